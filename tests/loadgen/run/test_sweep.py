"""A sweep: each level saved when it ends, cut where the target is past its limit, resumable."""

from __future__ import annotations

import asyncio
import gc
from array import array

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import EngineError, TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.run_store import RunStore, load_run
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, no_text
from lmi_bench.loadgen.run.level_parts import Share
from lmi_bench.loadgen.run.level_runner import LevelOrder, LevelRunner
from lmi_bench.loadgen.run.sweep import StopRules, in_order, levels_of, run_sweep
from tests.levels import level_of

MANIFEST = Manifest(scenario_hash="h")
PROMPTS = SyntheticPrompts([Lengths(8, 4)], no_text, seed=0)


def _levels(*concurrencies: int, per_user: int = 2, warmup: int = 0) -> list[LevelSpec]:
    return [
        LevelSpec(i, Load(concurrency=c), num_requests=c * per_user, warmup_requests=warmup)
        for i, c in enumerate(concurrencies)
    ]


def _summary(run):
    return Level(
        run.spec.index,
        run.attempt,
        run.spec.load,
        requests=len(run.records),
        errors=sum(not r.ok for r in run.records),
        stopped_by=run.stopped_by,
    )


class Server:
    """One second an answer up to `limit` requests at once, then a hundred seconds."""

    def __init__(self, limit=1000):
        self.limit = limit
        self.running = 0
        self.sent = []

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        self.sent.append(request.request_id)
        self.running += 1
        try:
            await asyncio.sleep(1.0 if self.running <= self.limit else 100.0)
        finally:
            self.running -= 1
        return Exchange(sent_s, (loop.time(),), (request.output_tokens,))


def _sweep(levels, target, store=None, **options):
    options = {"prompts": PROMPTS, "summarise": _summary, **options}
    return run_virtual(run_sweep(levels, target, store, **options))


def test_each_level_runs_once_and_is_saved(tmp_path):
    with RunStore.create(tmp_path / "run", MANIFEST) as store:
        result = _sweep(_levels(1, 2, 4), Server(), store)
    assert result[-1].stopped_by is None
    run = load_run(tmp_path / "run")
    assert [line.requests for line in run.levels] == [2, 4, 8]
    assert [len(records) for records in run.records] == [2, 4, 8]
    assert run.records[2][0].sent_s == 0.0  # seconds since the level's own start


def test_the_first_time_out_ends_the_sweep_after_its_level(tmp_path):
    with RunStore.create(tmp_path / "run", MANIFEST) as store:
        result = _sweep(_levels(1, 4, 8), Server(limit=2), store)
    assert result[-1].stopped_by == "timeout"
    assert [line.stopped_by for line in result] == [None, "timeout"]
    server = Server()
    with RunStore.resume(tmp_path / "run", MANIFEST) as store:  # it is finished: nothing runs again
        assert _sweep(_levels(1, 4, 8), server, store)[-1].stopped_by == "timeout"
    assert server.sent == []


def test_requests_in_flight_at_the_stop_are_kept():
    """Four users, two slots, 1.5 s allowed: two answers at 1 s, whose users send once more; the
    first time-outs at 1.5 s stop the sending, the second round's times out at 2.5 s."""
    levels = []
    _sweep(_levels(4, per_user=100), Server(limit=2), on_level=lambda run, line: levels.append(run), timeout_s=1.5)
    statuses = [record.status for record in levels[0].records]
    assert sorted(statuses) == ["ok"] * 2 + ["timeout"] * 4


def test_a_target_that_only_refuses_ends_the_sweep():
    class Refuses:
        async def send(self, request):
            await asyncio.sleep(0.01)
            raise TargetError("connect", "connection refused")

    result = _sweep(_levels(1, 2), Refuses())
    assert result[-1].stopped_by == "errors"
    assert len(result) == 1


def test_a_share_of_errors_is_borne_when_it_is_allowed():
    class EveryThird(Server):
        async def send(self, request):
            if request.request_id % 3 == 0:
                raise TargetError("overloaded", "503")
            return await super().send(request)

    result = _sweep(_levels(3, 6, per_user=4), EveryThird())
    assert result[-1].stopped_by is None
    assert [line.errors for line in result] == [4, 8]
    strict = _sweep(_levels(3, 6), EveryThird(), stop_rules=StopRules(max_error_share=0.1))
    assert (strict[-1].stopped_by, len(strict)) == ("errors", 1)


def test_one_of_several_workers_leaves_the_share_of_errors_to_the_sweep():
    """Its one failure is 20 % of its own five requests, and at most 3 % of the level's 40."""

    class RefusesOne(Server):
        async def send(self, request):
            if request.request_id == 0:
                raise TargetError("overloaded", "503")
            return await super().send(request)

    (spec,) = _levels(8, per_user=5)
    rules = StopRules(max_error_share=0.1)
    order = LevelOrder(spec, rules, timeout_s=None, spacing_s=0.0, seed=0, share=Share(0, 8))
    runner = LevelRunner(order, RefusesOne(), PROMPTS, lambda _: None)
    part = run_virtual(runner.run_part(lambda: asyncio.sleep(0, 0.0)))
    assert (len(part.records), part.stopped_by) == (5, None)


def test_nothing_is_retried():
    class Refuses(Server):
        async def send(self, request):
            self.sent.append(request.request_id)
            raise TargetError("throttled", "429")

    server = Refuses()
    _sweep(_levels(1, per_user=3), server, stop_rules=StopRules(max_error_share=None))
    assert server.sent == [0, 1, 2]


def test_warm_up_is_sent_first_and_left_out():
    server = Server()
    result = _sweep(_levels(2, warmup=3), server)
    assert server.sent[:3] == [-1, -2, -3]
    assert result[0].requests == 4


def test_a_cancellation_in_mid_level_leaves_a_run_that_resumes_there(tmp_path):
    """Levels of 2 s; cancelled at 3 s, in the second: the first stays byte for byte."""

    async def interrupted(store):
        task = asyncio.create_task(run_sweep(_levels(1, 2, 4), Server(), store, prompts=PROMPTS, summarise=_summary))
        await asyncio.sleep(3.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    path = tmp_path / "run"
    with RunStore.create(path, MANIFEST) as store:
        run_virtual(interrupted(store))
    before = (path / "levels.jsonl").read_bytes(), (path / "requests.jsonl").read_bytes()
    assert len(load_run(path).levels) == 1
    server = Server()
    with RunStore.resume(path, MANIFEST) as store:
        result = _sweep(_levels(1, 2, 4), server, store)
    assert [line.index for line in result] == [0, 1, 2]
    assert len(server.sent) == 4 + 8  # the finished level is not run again
    assert (path / "levels.jsonl").read_bytes().startswith(before[0])
    assert (path / "requests.jsonl").read_bytes().startswith(before[1])


def test_a_rule_may_pick_the_next_level():
    """Double until a level holds more than 8 requests."""

    def double(finished):
        if finished and finished[-1].requests > 8:
            return None
        return _levels(*(2**i for i in range(len(finished) + 1)))[-1]

    result = _sweep(double, Server())
    assert [line.requests for line in result] == [2, 4, 8, 16]


def test_progress_tells_how_far_it_is():
    """Two users, two rounds of a second: what ends at one instant is told once."""
    seen = []
    _sweep(_levels(2, warmup=1), Server(), on_progress=seen.append)
    assert [p.state for p in seen] == ["warm-up", *["running"] * 3, "decoding", "finished"]
    assert [p.done for p in seen] == [0, 0, 1, 3, 4, 4]
    last = seen[-1]
    assert (last.label, last.total, last.tokens, last.errors) == ("concurrency 2", 4, 16, 0)
    assert last.elapsed_s == pytest.approx(2.0)


def test_the_collector_rests_during_a_level_only():
    states = []

    class Watching(Server):
        async def send(self, request):
            states.append(gc.isenabled())
            return await super().send(request)

    _sweep(_levels(1), Watching())
    assert states == [False, False]
    assert gc.isenabled()


def test_connections_are_opened_before_the_clock_and_signals_read_after():
    class Opens(Server):
        async def open_level(self, connections):
            await asyncio.sleep(5.0)
            self.opened = connections

        def end_level(self):
            return ReceiveSignals("kernel", delays_s=array("d", [0.001]))

    runs = []
    server = Opens()
    _sweep(_levels(4), server, on_level=lambda run, line: runs.append(run))
    assert server.opened == 4
    assert runs[0].check.timestamps == "kernel"
    assert runs[0].records[0].sent_s == 0.0


def test_a_dead_engine_ends_the_sweep_with_its_own_error():
    class Dead:
        async def send(self, request):
            raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        _sweep(_levels(2), Dead())


def test_an_open_loop_level_sends_at_its_rate():
    runs = []
    level = LevelSpec(0, Load(rate_per_s=2.0, arrivals="constant"), num_requests=5)
    _sweep([level], Server(), on_level=lambda run, line: runs.append(run))
    assert [r.sent_s for r in runs[0].records] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])


def test_a_level_cut_by_its_duration_says_so_and_the_sweep_goes_on():
    levels = [LevelSpec(i, Load(concurrency=1), num_requests=100, duration_s=2.5) for i in range(2)]
    result = _sweep(levels, Server())
    assert [line.stopped_by for line in result] == ["duration", "duration"]


def test_a_level_has_three_requests_per_user_and_at_least_32_beside_the_first_of_each():
    levels = levels_of(parse_scenario({"load": {"concurrency": [1, 8, 16]}}))
    assert [level.num_requests for level in levels] == [32 + 1, 32 + 8, 48 + 16]


def test_requests_of_a_level_are_users_times_requests_per_user():
    scenario = parse_scenario({"load": {"concurrency": [1, 8], "requests_per_user": 5}})
    assert [(level.index, level.num_requests) for level in levels_of(scenario)] == [(0, 6), (1, 48)]


def test_requests_per_level_wins_and_a_duration_bounds_it():
    scenario = parse_scenario({"load": {"concurrency": [8], "requests_per_level": 10, "duration_s": 3}})
    (level,) = levels_of(scenario)
    assert (level.num_requests, level.duration_s) == (10 + 8, 3.0)


def test_a_rate_without_a_number_sends_a_hundred():
    scenario = parse_scenario({"load": {"rate_per_s": [0.5, 2], "arrivals": "constant"}})
    levels = levels_of(scenario)
    assert [(level.rate_per_s, level.num_requests) for level in levels] == [(0.5, 100), (2.0, 100)]
    assert levels[0].load.arrivals == "constant"


def test_finished_levels_are_left_out():
    levels = levels_of(parse_scenario({"load": {"concurrency": [1, 2, 4]}}))
    rule = in_order(levels)
    assert rule([level_of(), level_of(level=2)]) == levels[1]
    assert rule([level_of(level=n) for n in range(3)]) is None
