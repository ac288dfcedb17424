"""The cache's blocks and the weights against free memory."""

from __future__ import annotations

import pytest
import torch

from lmi_bench.core.errors import CapacityError
from lmi_bench.engine.torch_backend import memory
from lmi_bench.engine.torch_backend.memory import blocks_that_fit, check_weights_fit

CPU = torch.device("cpu")


def test_blocks_are_rounded_down_and_capped():
    assert blocks_that_fit(1000, 0.5, 60) == 8
    assert blocks_that_fit(1000, 0.5, 60, most=3) == 3


def test_less_than_a_block_is_refused_with_both_numbers():
    with pytest.raises(CapacityError, match=r"50% of the 1,000 bytes .* block of 600 bytes"):
        blocks_that_fit(1000, 0.5, 600)


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(monkeypatch):
    """A pebibyte, on any machine, and one byte more than a free GiB."""
    check_weights_fit("small", 1, CPU)
    with pytest.raises(CapacityError, match=r"weights of huge take 1048576\.0 GiB and .* --tp"):
        check_weights_fit("huge", 1 << 50, CPU)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _device: 1 << 30)
    check_weights_fit("just", 1 << 30, CPU)
    with pytest.raises(CapacityError, match="weights of over take"):
        check_weights_fit("over", (1 << 30) + 1, CPU)
