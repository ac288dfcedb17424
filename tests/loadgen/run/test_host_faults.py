"""Workers that misbehave, each played by a thread: the sweep names them, and says what is exact."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.listener import Silent
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.run import hosts, worker_pool
from lmi_bench.loadgen.run.channel import ClosedError, Failed, Job, Ping, Ready, Start, Stop
from lmi_bench.loadgen.run.hosts import JOIN, dial, let_in
from lmi_bench.loadgen.run.level_parts import LevelPart
from lmi_bench.loadgen.run.level_runner import LevelOrder, Progress, StopRules
from lmi_bench.loadgen.run.self_check import LoopWatch
from lmi_bench.loadgen.run.worker_pool import WorkerPool

SECRET = "a secret of 24 characters"
SPEC = LevelSpec(0, Load(rate_per_s=100.0, arrivals="constant"), num_requests=40)
PINGS = 6  # answered during the level, which then ends: 1.5 s


class Played:
    """A worker whose clock is ahead by `skew_s`; what it does wrong is set before the level."""

    def __init__(self, number, skew_s=0.0):
        self.number, self.skew_s = number, skew_s
        self.step_s = self.late_sends_s = self.late_frac = 0.0
        self.errors, self.fault, self.stop = 0, None, None
        self.after_part = lambda: None
        self.leaves = self.is_silent = False
        self.failure: Failed | None = None
        self.began_s = 0.0
        self.is_sending = False

    def play(self, address):
        self.channel = dial(address, print)
        self.channel.greet(SECRET, Ready(self.number))
        self.job = self.channel.receive(Job)
        self.channel.send(Ready())
        with contextlib.suppress(ClosedError):
            while True:
                self.answer(self.channel._next())
        self.channel.close()

    def now_s(self):
        return time.monotonic() + self.skew_s

    def answer(self, message):
        if self.is_silent:
            return
        if isinstance(message, LevelOrder):
            self.order = message
            self.channel.send(Ready())
        elif isinstance(message, Start):
            self.began_s, self.pings, self.is_sending = message.at_s, 0, True
        elif isinstance(message, Stop):
            self.stop = message
        elif isinstance(message, Ping):
            if self.is_sending:
                self.pings += 1
                self.during_the_level()
            self.channel.send(Ping(message.sent_s, self.now_s(), self.now_s(), self.late_frac))
            if self.is_sending and self.pings == PINGS:
                self.is_sending = False
                self.channel.send(self.part())
                self.after_part()

    def during_the_level(self):
        self.channel.send(Progress(0, "100 req/s", "running", self.pings, None, self.errors, 1.0, 9))
        if self.pings != 3:
            return
        self.skew_s += self.step_s
        if self.failure is not None:
            self.channel.send(self.failure)
        if self.leaves:
            raise ClosedError

    def part(self):
        records = []
        for number in self.order.share.numbers(SPEC):
            due_s = number / 100
            sent_s = due_s + self.late_sends_s
            times_s = (sent_s + 0.1, sent_s + 0.2)
            records.append(RequestRecord(number, due_s, Exchange(sent_s, times_s, ttft_bound_s=0)))
        return LevelPart(tuple(records), ReceiveSignals("kernel"), LoopWatch(), None, fault=self.fault)


class Heard(Silent):
    def __init__(self):
        self.address, self.waits = "", threading.Event()
        self.warnings = []

    def note(self, text):
        self.address = text.split()[-1]
        self.waits.set()

    def warn(self, text):
        self.warnings.append(text)


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setenv("LMI_BENCH_SECRET", SECRET)
    return Heard()


def _level(workers, heard, count=1, max_error_share=None):
    """The runs of levels that these workers send."""
    job = Job({}, {}, "", headers={"Authorization": "Bearer sk-1"})
    pool = WorkerPool(job, hosts=(JOIN,) * len(workers), listener=heard)
    threads = []

    def dial_in():
        assert heard.waits.wait(120)
        for worker in workers:
            threads.append(threading.Thread(target=worker.play, args=(heard.address,)))
            threads[-1].start()

    dialling = threading.Thread(target=dial_in)
    dialling.start()
    rules = StopRules(max_error_share=max_error_share)
    order = LevelOrder(SPEC, rules, None, 0.0, 0)

    async def main():
        options = (order, 1, len(workers), lambda _: None, lambda: asyncio.sleep(0))
        return [await pool.run_level(*options) for _ in range(count)]

    try:
        with contextlib.closing(pool):
            pool.open()
            return asyncio.run(main())
    except BaseExceptionGroup as group:  # as `run_sweep` does
        raise group.exceptions[0] from group
    finally:
        dialling.join()
        for thread in threads:
            thread.join(120)


def test_workers_with_other_clocks_begin_at_one_instant_and_the_error_is_stated(heard):
    workers = [Played(0, skew_s=-1000.0), Played(1, skew_s=86_400.0)]
    (run,) = _level(workers, heard)
    first_s, second_s = (worker.began_s - worker.skew_s for worker in workers)
    assert run.check.valid
    assert 0 < run.check.clock_error_bound_ms < 50
    assert abs(first_s - second_s) <= 2e-3 * run.check.clock_error_bound_ms
    assert [record.request_id for record in run.records] == list(range(40))
    assert heard.warnings == []
    assert workers[0].job.headers == {"Authorization": ""}  # a value does not go over TCP


def test_a_clock_that_steps_is_named_while_the_level_runs_and_makes_it_invalid(heard):
    workers = [Played(0), Played(1)]
    workers[1].step_s = 0.5
    stepped, next_one = _level(workers, heard, count=2)
    assert not stepped.check.valid
    assert stepped.check.reason.startswith("client: worker 1 (127.0.0.1:")
    assert "its clock has stepped by" in stepped.check.reason
    assert stepped.check.clock_error_bound_ms >= 500
    assert sum("stepped" in line for line in heard.warnings) == 2  # it steps in each level
    workers[1].step_s = 0.0
    assert not next_one.check.valid


def test_a_level_after_a_step_is_valid_again(heard):
    workers = [Played(0)]
    workers[0].step_s = 0.5

    def once(worker=workers[0], usual=workers[0].during_the_level):
        usual()
        if worker.pings == 3:
            worker.step_s = 0.0

    workers[0].during_the_level = once
    first, second = _level(workers, heard, count=2)
    assert (first.check.valid, second.check.valid) == (False, True)
    assert second.check.clock_error_bound_ms < 50


def test_a_step_between_two_levels_is_in_neither(heard):
    workers = [Played(0)]

    def answer(message, usual=workers[0].answer):
        if isinstance(message, LevelOrder):
            workers[0].skew_s += 0.5
        usual(message)

    workers[0].answer = answer
    assert [run.check.valid for run in _level(workers, heard, count=2)] == [True, True]
    assert heard.warnings == []


def test_a_step_at_the_very_end_of_a_level_is_found_by_the_pings_after_it(heard):
    workers = [Played(0)]

    def step():
        workers[0].skew_s += 0.5

    workers[0].after_part = step
    (run,) = _level(workers, heard)
    assert not run.check.valid
    assert "its clock has stepped by" in run.check.reason


def test_a_worker_that_reaches_a_stop_rule_stops_the_others(heard):
    workers = [Played(0), Played(1)]

    def stop(usual=workers[0].during_the_level):
        usual()
        if workers[0].pings == 3:
            state = Progress(0, "100 req/s", "running", 3, None, 3, 1.0, 9, stopped_by="errors")
            workers[0].channel.send(state)

    workers[0].during_the_level = stop
    _level(workers, heard)
    assert workers[1].stop == Stop("errors")


def test_failures_end_a_level_by_their_share_of_all_its_requests(heard):
    """Of 40 one in ten may fail, whichever worker sends it: the fifth is too many."""
    workers = [Played(0), Played(1)]
    workers[0].errors, workers[1].errors = 2, 3
    _level(workers, heard, max_error_share=0.1)
    assert [worker.stop for worker in workers] == [Stop("errors")] * 2


def test_a_worker_that_decodes_may_be_silent_until_it_is_done(heard, monkeypatch):
    monkeypatch.setattr(worker_pool, "SILENT_S", 0.2)
    workers = [Played(0)]

    def decode(usual=workers[0].part):
        workers[0].channel.send(Progress(0, "100 req/s", "decoding", 9, None, 0, 1.0, 9))
        time.sleep(0.6)
        return usual()

    workers[0].part = decode
    (run,) = _level(workers, heard)
    assert run.check.valid


def test_the_number_of_a_worker_counts_those_that_dial_in(heard):
    """With `local,join,local,join` they are the workers 1 and 3, and the pods of their job 0 and 1."""

    def dial_in():
        assert heard.waits.wait(120)
        for number in (1, 0):
            with contextlib.closing(dial(heard.address, print)) as channel:
                channel.greet(SECRET, Ready(number))

    dialling = threading.Thread(target=dial_in)
    dialling.start()

    def check():
        assert not heard.warnings  # such as that a number has no place

    found = list(let_in(("127.0.0.1", 0), [1, 3], heard, check))
    dialling.join()
    for _, channel in found:
        channel.close()
    assert [number for number, _ in found] == [3, 1]


def test_a_sweep_that_listens_on_all_addresses_is_reached_by_either_kind(heard):
    """As in a cluster whose pods have addresses of IPv6 alone, or of IPv4 alone."""

    def dial_in():
        assert heard.waits.wait(120)
        port = heard.address.rpartition(":")[2]
        with contextlib.closing(dial(f"127.0.0.1:{port}", print)) as channel:
            channel.greet(SECRET, Ready())

    threading.Thread(target=dial_in, daemon=True).start()
    looks = iter(range(40))
    ((number, channel),) = let_in(("::", 0), [0], heard, lambda: next(looks))
    channel.close()
    assert (number, channel.name[:20]) == (0, "worker 0 (127.0.0.1:")


def test_a_stranger_who_says_nothing_keeps_nobody_out(heard, monkeypatch):
    monkeypatch.setattr(hosts, "_GREETING_S", 0.2)
    with contextlib.ExitStack() as strangers:
        note = heard.note

        def first(text):
            if not heard.address:
                host, port = text.split()[-1].split(":")
                strangers.enter_context(socket.create_connection((host, int(port))))
            note(text)

        heard.note = first
        (run,) = _level([Played(0)], heard)
    assert run.check.valid
    assert heard.warnings[0].startswith("a worker is refused: 127.0.0.1:")


def test_a_start_that_comes_late_makes_the_level_invalid_by_name(heard):
    workers = [Played(0), Played(1)]
    workers[0].fault = "the start reached it 80 ms late"
    (run,) = _level(workers, heard)
    assert not run.check.valid
    assert "worker 0 (127.0.0.1:" in run.check.reason
    assert "the start reached it 80 ms late" in run.check.reason


def test_a_worker_short_of_a_core_is_named_while_the_level_runs(heard):
    """Its requests left in time all the same, so the level stays valid."""
    workers = [Played(0), Played(1)]
    workers[1].late_frac = 0.6
    (run,) = _level(workers, heard)
    (line,) = heard.warnings
    assert line.startswith("worker 1 (127.0.0.1:")
    assert "gets too little of a core: its loop was late for 60% of a second" in line
    assert run.check.valid


def test_late_sends_of_one_worker_among_many_make_the_level_invalid_by_name(heard):
    workers = [Played(n) for n in range(2)]
    workers[1].late_sends_s = 0.2
    (run,) = _level(workers, heard)
    assert not run.check.valid
    assert "requests left 200.0 ms late" in run.check.reason
    assert "(worker 1 (127.0.0.1:" in run.check.reason


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"leaves": True}, r"worker 1 \(.*\) has closed the connection: the level in flight is l"),
        ({"is_silent": True}, r"worker 1 \(.*\) has not answered for 1\.\d s"),
        ({"failure": Failed("out of memory")}, r"worker 1 \(.*\): out of memory"),
    ],
)
def test_a_worker_that_is_lost_ends_the_level_by_name(heard, wrong, said):
    workers = [Played(0), Played(1)]

    def begin(usual=workers[1].during_the_level):
        for name, value in wrong.items():
            setattr(workers[1], name, value)
        usual()

    workers[1].during_the_level = begin
    with pytest.raises(LmiBenchError, match=said):
        _level(workers, heard)
