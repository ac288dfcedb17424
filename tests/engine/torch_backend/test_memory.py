"""The cache's blocks and the weights against free memory."""

from __future__ import annotations

import pytest
import torch

from lmi_bench.core.errors import CapacityError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.torch_backend import memory
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.memory import check_weights_fit
from lmi_bench.targets.back_ends import BackEnd
from lmi_bench.targets.loading import LoadPlan, check_memory

CPU = torch.device("cpu")


def test_blocks_are_rounded_down_and_capped():
    assert LoadSettings().blocks_in(1000, 60) == 8
    assert LoadSettings(block_size=16, most_cache_tokens=63).blocks_in(1000, 60) == 3
    assert LoadSettings(num_blocks=20).blocks_in(1000, 60) == 20


def test_less_than_a_block_is_refused_with_both_numbers():
    with pytest.raises(CapacityError, match=r"50% of the 1,000 bytes .* block of 600 bytes"):
        LoadSettings().blocks_in(1000, 600)


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(monkeypatch):
    """A pebibyte, on any machine, and one byte more than a free GiB."""
    check_weights_fit("small", 1, CPU)
    with pytest.raises(CapacityError, match=r"weights of huge take 1048576\.0 GiB and .* --tp"):
        check_weights_fit("huge", 1 << 50, CPU)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _device: 1 << 30)
    check_weights_fit("just", 1 << 30, CPU)
    with pytest.raises(CapacityError, match="weights of over take"):
        check_weights_fit("over", (1 << 30) + 1, CPU)


def test_every_copy_needs_its_weights(monkeypatch, make_llama):
    folder, asked = make_llama().folder, []
    monkeypatch.setattr(memory, "check_weights_fit", lambda _, nbytes, __: asked.append(nbytes))
    for copies in (1, 8):
        settings = EngineSection(replicas=copies)
        check_memory(LoadPlan(settings, "llama", folder, None, 1, 1, None, 64, BackEnd()), "float32")
    assert asked[1] == 8 * asked[0] > 0
