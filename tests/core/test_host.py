"""How many cores this process may keep busy, and how much memory it may take."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from lmi_bench.core.host import available_memory_bytes, usable_cores
from lmi_bench.core.units import MIB


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "3200000 100000\n"}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({}, 16),
    ],
)
def test_a_containers_quota_of_time_limits_the_cores(tmp_path, sixteen_cores, files, cores):
    """Both versions' files, as the kernel's cgroup documentation has them."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  2048000 kB\nMemFree:   1000 kB\nMemAvailable: 1024000 kB\n")
    return path


def test_without_a_limit_it_is_what_the_kernel_calls_available(meminfo, tmp_path):
    assert available_memory_bytes(meminfo, tmp_path / "none") == 1024000 * 1024


def test_a_containers_limit_counts_less_what_it_uses_but_its_file_cache(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text(f"{500 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\nactive_file 7\n")
    assert available_memory_bytes(meminfo, tmp_path) == 250 * MIB


def test_a_container_without_limit_bounds_nothing(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert available_memory_bytes(meminfo, tmp_path) == 1024000 * 1024


def test_the_older_kind_of_limit_counts_too(meminfo, tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{400 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{100 * MIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {10 * MIB}\n")
    assert available_memory_bytes(meminfo, tmp_path) == 310 * MIB


def test_this_machine_has_some(tmp_path):
    assert available_memory_bytes() > 0
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") > 0


FREED = """
import pathlib
from lmi_bench.core.host import return_large_allocations

def resident_mib():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) / 256

def memory(num_bytes):
    return bytearray(b"x") * num_bytes

return_large_allocations(4 << 20)
memory(24 << 20)  # freed, it raises glibc's own limit
before = resident_mib()
pieces = [memory(num_bytes) for _ in range(8) for num_bytes in (12 << 20, 64 << 10)]
del pieces[::2]
print(resident_mib() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_large_memory_is_returned_when_it_is_freed():
    """Eight pieces of 12 MiB between small ones in use: 0.5 MiB is left of 96 that glibc keeps."""
    ended = subprocess.run([sys.executable, "-c", FREED], capture_output=True, check=True, text=True)
    assert float(ended.stdout) < 8
