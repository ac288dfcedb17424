"""Free memory as the kernel and a container's limits state it; files made by hand."""

from __future__ import annotations

import pytest
import torch

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.torch_backend import memory
from lmi_bench.engine.torch_backend.memory import (
    blocks_that_fit,
    check_weights_fit,
    free_memory_bytes,
)

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  2048000 kB\nMemFree:   1000 kB\nMemAvailable: 1024000 kB\n")
    return path


def free(meminfo, cgroups):
    return free_memory_bytes(CPU, meminfo=meminfo, cgroups=cgroups)


def test_without_a_limit_it_is_what_the_kernel_calls_available(meminfo, tmp_path):
    assert free(meminfo, tmp_path / "none") == 1024000 * 1024


def test_a_containers_limit_counts_less_what_it_uses_but_its_file_cache(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text(f"{500 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\nactive_file 7\n")
    assert free(meminfo, tmp_path) == 250 * MIB


def test_a_container_without_limit_bounds_nothing(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert free(meminfo, tmp_path) == 1024000 * 1024


def test_the_older_kind_of_limit_counts_too(meminfo, tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{400 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{100 * MIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {10 * MIB}\n")
    assert free(meminfo, tmp_path) == 310 * MIB


def test_this_machine_has_some(tmp_path):
    assert free_memory_bytes(CPU) > 0
    assert free(tmp_path / "none", tmp_path / "none") > 0


def test_blocks_are_rounded_down_and_capped():
    assert blocks_that_fit(1000, 0.5, 60) == 8
    assert blocks_that_fit(1000, 0.5, 60, most=3) == 3


def test_less_than_a_block_is_refused_with_both_numbers():
    with pytest.raises(CapacityError, match=r"50% of the 1,000 bytes .* block of 600 bytes"):
        blocks_that_fit(1000, 0.5, 600)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_a_share_must_be_one(share):
    with pytest.raises(InputError, match="memory_share must be above 0 and at most 1"):
        blocks_that_fit(1000, share, 10)


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(monkeypatch):
    """A pebibyte, on any machine, and one byte more than a free GiB."""
    check_weights_fit("small", 1, CPU)
    with pytest.raises(CapacityError, match=r"weights of huge take 1048576\.0 GiB and .* --tp"):
        check_weights_fit("huge", 1 << 50, CPU)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _device: 1 << 30)
    check_weights_fit("just", 1 << 30, CPU)
    with pytest.raises(CapacityError, match="weights of over take"):
        check_weights_fit("over", (1 << 30) + 1, CPU)
