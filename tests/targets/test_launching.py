"""Which processes of a launcher such as torchrun have work, and which would wait for themselves."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.targets.process import launched_degree, refuse_to_follow

TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def as_rank(monkeypatch):
    def start(rank: int) -> None:
        for name, value in (TORCHRUN | {"RANK": str(rank)}).items():
            monkeypatch.setenv(name, value)

    return start


def test_a_command_without_work_for_the_other_ranks_refuses_to_be_one(as_rank):
    as_rank(1)
    with pytest.raises(InputError, match="as rank 1: only `serve` and `generate`"):
        refuse_to_follow()


def test_rank_0_and_a_process_of_no_launcher_go_on(as_rank):
    refuse_to_follow()
    as_rank(0)
    refuse_to_follow()


def test_the_launchers_number_of_ranks_is_the_degree(as_rank):
    as_rank(0)
    assert launched_degree(EngineSection(tensor_parallel="max")) == 2
    with pytest.raises(InputError, match="give --tp 2 or --tp max"):
        launched_degree(EngineSection(tensor_parallel=4))
