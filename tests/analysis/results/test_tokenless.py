"""Answers without tokens, as embeddings: they have an end, and their levels input tokens alone."""

import pytest

from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.knee import find_knees
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.sweep_curve import work_per_s
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.workload import LevelSpec


def run_of(index, users, answer_s, num_requests=40):
    """Users that send at once whenever an answer of this time has come, 10 tokens each."""
    records = [
        RequestRecord(
            request_id=number,
            due_s=(at_s := number // users * answer_s),
            exchange=Exchange(at_s, ended_s=at_s + answer_s, streamed=False, output_tokens=0),
            input_tokens=10,
            asked_tokens=256,
        )
        for number in range(num_requests)
    ]
    spec = LevelSpec(index, Load(concurrency=users), num_requests=num_requests)
    return LevelRun(spec, 1, tuple(records))


def test_the_end_of_an_answer_without_tokens_is_its_only_latency():
    run = run_of(0, 2, 0.5)
    columns = columns_of(run.records)
    values_ms, rows = columns.values_ms("e2e", open_loop=False)
    assert values_ms == pytest.approx([500.0] * 40)
    assert list(rows) == list(range(40))
    assert columns.values_s("e2e_from_sent", open_loop=False)[0] == pytest.approx([0.5] * 40)
    for metric in ("ttft", "tpot", "itl", "latency_per_token"):
        assert not columns.values_ms(metric, open_loop=False)[0].size
    assert columns.wall_s == pytest.approx(10.0)  # 20 answers of each user, 0.5 s each


def test_a_level_without_tokens_has_the_throughput_of_its_input():
    """40 prompts of 10 tokens in 10 s."""
    line = summarise_level(run_of(0, 2, 0.5))
    assert line.is_tokenless
    assert line.wall_s == pytest.approx(10.0)
    assert work_per_s(line) == line.total_throughput_tokens_per_s == pytest.approx(40.0)
    assert line.request_throughput_per_s == pytest.approx(4.0)
    assert line.mean_concurrency == pytest.approx(2.0)
    assert line.unplanned_lengths is None


def test_the_knee_is_the_bend_of_the_input_and_no_rule_has_a_time_per_token():
    """Four places of 0.1 s: with more users than four the answers wait."""
    runs = [run_of(i, users, 0.1 * max(1, users / 4)) for i, users in enumerate((1, 2, 4, 8, 16))]
    knees = find_knees([summarise_level(run) for run in runs], records=[run.records for run in runs])
    by_rule = {knee.rule: knee for knee in knees}
    assert by_rule["kneedle"].concurrency == 4
    for rule in ("latency_limit", "half_latency"):
        assert by_rule[rule].load is None
        assert by_rule[rule].why.startswith("answers without tokens have no ms/token")
