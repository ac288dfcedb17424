"""The audit of stated capacities: what is drawn, what counts as a miss; time outside the engine."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import first_hour, slo_search
from benchmarks.first_hour import drawn_cells
from lmi_bench.analysis.level.layouts import Layout, Workload, plan_copy
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import EXIT_SLO_MISSED
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec

PAGE = Path(first_hour.__file__).parent / "results" / "first_hour.md"


@pytest.fixture(scope="module")
def cells():
    return list(islice(drawn_cells(seed=3), 8))


def test_a_seed_draws_its_cells_and_the_regimes_take_turns(cells):
    assert cells == list(islice(drawn_cells(seed=3), 8))
    assert cells != list(islice(drawn_cells(seed=4), 8))
    regimes = [cell.regime for cell in cells]
    assert regimes[0::4] == ["kv_memory"] * 2
    assert regimes[1::4] == ["compute"] * 2
    assert regimes[2::4] == ["bandwidth"] * 2


def audit(cells, monkeypatch, tmp_path, *, worst):
    """The first cell's audit, if recommend states 2 [1-4] req/s of one copy; and the rates."""
    seen = []

    def at(cell, rates, folder, *, seed):
        seen.append((*rates, seed))
        return worst[seed]

    def answers(words, folder):
        figures = '{"predicted": 6.0, "low": 3.0, "high": 12.0}'
        (folder / "answer.json").write_text(
            f'{{"recommended": {{"instances": 1, "replicas": 3, "instance": "ml.x", "limited_by":'
            f' "", "tensor_parallel": 1, "capacity_rate_per_s": {figures}}}}}'
        )
        return 0

    monkeypatch.setattr(first_hour, "worst_at", at)
    monkeypatch.setattr(first_hour, "run_quietly", answers)
    return first_hour.audited(cells[0], tmp_path / f"{random.random()}"), seen


def test_both_ends_of_a_copys_share_are_simulated(cells, monkeypatch, tmp_path):
    found, seen = audit(cells, monkeypatch, tmp_path, worst={1: [0.8, 1.7]})
    assert seen == [(1.0, pytest.approx(1.15 * 4.0), 1)]
    assert found.verdict == "holds"


def test_near_a_limit_the_median_of_three_draws_counts(cells, monkeypatch, tmp_path):
    worst = {1: [0.95, 3.0], 2: [1.2, 3.0], 3: [1.1, 3.0]}
    found, seen = audit(cells, monkeypatch, tmp_path, worst=worst)
    assert [seed for *_, seed in seen] == [1, 2, 3]
    assert found.low == 1.1
    assert found.verdict == "MISS: broken at the lower end"


def test_a_cell_that_keeps_its_slos_above_the_interval_is_a_miss(cells, monkeypatch, tmp_path):
    found, _ = audit(cells, monkeypatch, tmp_path, worst={1: [0.5, 0.8]})
    assert found.verdict == "MISS: kept above the upper end"


def test_a_cell_that_no_load_keeps_is_left_out(cells, monkeypatch, tmp_path):
    monkeypatch.setattr(first_hour, "run_quietly", lambda *_: EXIT_SLO_MISSED)
    assert first_hour.audited(cells[0], tmp_path / "cell") is None


def test_the_page_has_twenty_cells_of_which_eighteen_hold():
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 20
    assert sum(row.endswith("| holds |") for row in rows) >= 18
    assert {row.split(" | ")[7] for row in rows} >= {"kv_memory", "compute", "bandwidth"}


def test_searched_instances_count_the_time_outside_the_engine():
    level = slo_search.instance("llama-2-7b", "ml.g5.2xlarge", 1)(LevelSpec(0, Load(1), num_requests=1))
    workload = Workload(find_model("llama-2-7b"), "float16", 256, 256)
    copy = plan_copy(Layout(find_instance("ml.g5.2xlarge"), 1), workload, TGI_2023, open_loop=False)
    outside_s = TGI_2023.parameters.request_overhead_s
    assert outside_s > 0.005
    alone_s = outside_s + copy.steady.prompt_step_s
    assert level.records[0].token_times_s[0] == pytest.approx(alone_s)
