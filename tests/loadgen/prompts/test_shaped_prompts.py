"""Drawn lengths and recorded traffic, through the load generator in virtual time."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.lengths import parse_lengths
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.run_store import RunStore, load_run
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.traces import read_trace
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.loadgen.prompts.prompts import DrawnLengths, SyntheticPrompts, TokenIds, TracePrompts, no_text
from lmi_bench.loadgen.run.sweep import levels_of, run_sweep

TRACE = "".join(
    f'{{"timestamp": {ms}, "input_length": {size}, "output_length": 2}}\n'
    for ms, size in ((0, 5), (1000, 6), (1500, 7), (4000, 8))
)


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


class Instant:
    """Answers a second after it was asked."""

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        await asyncio.sleep(1.0)
        return Exchange(sent_s, (loop.time(),), (request.output_tokens,))


def test_lengths_are_drawn_alike_at_every_level():
    prompts = SyntheticPrompts(
        DrawnLengths(parse_lengths("normal(622,50)"), parse_lengths("uniform(1,9)")), no_text, seed=1
    )
    low, high = (LevelSpec(0, Load(concurrency=1), num_requests=1), LevelSpec(1, Load(rate_per_s=2), num_requests=1))
    requests = [prompts.request(low, number) for number in range(4000)]
    assert [prompts.request(high, n) for n in range(20)] == requests[:20]
    assert statistics.fmean(r.input_tokens for r in requests) == pytest.approx(622, rel=0.01)
    assert statistics.pstdev(r.input_tokens for r in requests) == pytest.approx(50, rel=0.05)
    assert {r.output_tokens for r in requests} == set(range(1, 10))


@pytest.mark.parametrize(("speed", "due"), [(1.0, [0, 1, 1.5, 4]), (2.0, [0, 0.5, 0.75, 2])])
def test_a_trace_is_replayed_at_its_own_times(trace_file, tmp_path, speed, due):
    scenario = parse_scenario({"workload": {"trace": str(trace_file)}, "load": {"speed": speed, "warmup_requests": 0}})
    prompts = TracePrompts(read_trace(trace_file), no_text, seed=0)
    with RunStore.create(tmp_path / "run", Manifest(scenario_hash="h")) as store:
        run_virtual(run_sweep(levels_of(scenario), Instant(), store, prompts=prompts, summarise=summarise_level))
    (records,) = load_run(tmp_path / "run").records
    assert [r.due_s for r in records] == pytest.approx(due)
    assert [r.sent_s for r in records] == pytest.approx(due)
    assert [r.input_tokens for r in records] == [5, 6, 7, 8]


def test_the_simulator_replays_a_trace_at_the_same_times(trace_file):
    class Step:
        def step_time_s(self, shape):
            return 0.01

    prompts = TracePrompts(read_trace(trace_file), no_text, seed=0)
    (spec,) = levels_of(parse_scenario({"workload": {"trace": str(trace_file)}}))
    config = SchedulerConfig(num_blocks=64, block_size=16, max_model_len=128)
    run = simulate_level(spec, lambda n: prompts.request(spec, n), config, Step())
    assert [record.due_s for record in run.records] == pytest.approx([0, 1, 1.5, 4])


def test_sources_of_lengths_exclude_each_other():
    with pytest.raises(InputError, match="give either mix or input_lengths or output_lengths"):
        parse_scenario({"workload": {"input_lengths": "fixed(3)", "mix": [{"input_tokens": 1, "output_tokens": 1}]}})
    with pytest.raises(InputError, match="not understood"):
        parse_scenario({"workload": {"input_lengths": "zipf(3)"}})
    with pytest.raises(InputError, match="speed applies to a trace"):
        parse_scenario({"load": {"speed": 2}})


def test_a_trace_counts_with_its_bytes(trace_file):
    before = parse_scenario({"workload": {"trace": str(trace_file)}}).hash()
    trace_file.write_text(TRACE.replace("5", "9"))
    assert parse_scenario({"workload": {"trace": str(trace_file)}}).hash() != before


def test_a_length_on_the_command_line_replaces_a_distribution():
    drawn = parse_scenario({"workload": {"input_lengths": "normal(622,50)"}})
    assert drawn.with_overrides({"workload.input_tokens": 8}).workload.input_lengths is None


@pytest.mark.parametrize(
    ("load", "due"),
    [
        ({"rate_per_s": 4, "requests_per_level": 3}, [0, 1 / 3, 0.5]),
        ({"rate_per_s": 1.5, "duration_s": 2}, [0, 8 / 9, 4 / 3]),
        ({"speed": 2, "duration_s": 0.6}, [0, 0.5]),
        ({"speed": 2, "requests_per_level": 3}, [0, 0.5, 0.75]),
    ],
)
def test_a_part_of_a_trace_has_the_mean_rate_of_its_level(trace_file, load, due):
    """Not that of the whole trace, which may be busier later."""
    (spec,) = levels_of(parse_scenario({"workload": {"trace": str(trace_file)}, "load": load}))
    prompts = TracePrompts(read_trace(trace_file), no_text, seed=0)
    assert spec.num_requests == len(due)
    assert [prompts.request(spec, n).arrival_s for n in range(len(due))] == pytest.approx(due)
    assert (len(due) - 1) / due[-1] == pytest.approx(spec.rate_per_s)


def test_a_trace_that_is_played_again_has_other_text_and_later_times(tmp_path):
    """Four requests in 4 s: the next play begins one mean gap after the last one's end."""
    path = tmp_path / "blocks.jsonl"
    path.write_text(TRACE.replace("}", ', "hash_ids": [7]}'))
    prompts = TracePrompts(read_trace(path), TokenIds(50_000), seed=0)
    spec = LevelSpec(0, Load(rate_per_s=0.75), duration_s=60)
    first, last, again, after = (prompts.request(spec, number) for number in (0, 3, 4, 5))
    assert [each.arrival_s for each in (first, last, again, after)] == pytest.approx([0, 4, 4 + 4 / 3, 5 + 4 / 3])
    assert first.prompt_token_ids == last.prompt_token_ids[:5]
    assert again.prompt_token_ids == after.prompt_token_ids[:5] != first.prompt_token_ids


@pytest.mark.parametrize(
    ("more", "said"), [("", "does not fit the trace's prompts of 6"), (', "hash_ids": [7]', "hash")]
)
def test_a_shared_prefix_that_a_trace_has_no_room_for_is_refused(tmp_path, more, said):
    path = tmp_path / "t.jsonl"
    path.write_text(TRACE.replace("}", f"{more}}}"))
    with pytest.raises(InputError, match=said):
        TracePrompts(read_trace(path), no_text, seed=0, shared_prefix=6)
