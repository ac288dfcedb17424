"""Messages between a sweep and a worker: what is sent arrives, and nothing else is believed."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
import tracemalloc
from array import array
from collections import Counter
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from lmi_bench import __version__
from lmi_bench.core.errors import InputError, LmiBenchError, TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.jobs import worker as worker_jobs
from lmi_bench.loadgen.http.kernel_time import stamping_socket
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, no_text
from lmi_bench.loadgen.run import channel as of_channel
from lmi_bench.loadgen.run.channel import Channel, ClosedError, Failed, Job, Ping, Ready, Start, Stop
from lmi_bench.loadgen.run.hosts import _over as over
from lmi_bench.loadgen.run.level_parts import LevelPart, Share
from lmi_bench.loadgen.run.level_runner import LevelOrder, Progress, StopRules
from lmi_bench.loadgen.run.self_check import LoopWatch

SECRET = "a secret of 24 characters"
SPEC = LevelSpec(3, Load(rate_per_s=2.5, arrivals="gamma", burstiness=0.5), num_requests=9)


def _channel(end, name, role):
    both = Connection(os.dup(end.fileno()))
    return Channel(both, both, name, role)


@contextmanager
def sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ends = [_channel(ours, "w", "sweep"), _channel(theirs, "s", "worker")]
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def _greeted(sweep, worker, secret=SECRET, workers_secret=SECRET):
    """What each side ends with: a value or an error."""
    found = {}

    def side(name, greet):
        try:
            found[name] = greet()
        except LmiBenchError as exc:
            found[name] = exc
            (sweep if name == "sweep" else worker).close()

    greets = {"sweep": lambda: sweep.greet(secret), "worker": lambda: worker.greet(workers_secret, Ready(2))}
    threads = [threading.Thread(target=side, args=each) for each in greets.items()]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    return found


@pytest.fixture
def pair():
    with sockets() as (sweep, worker):
        assert _greeted(sweep, worker) == {"sweep": Ready(2), "worker": Ready()}
        yield sweep, worker


def test_messages_arrive_as_they_were_sent(pair):
    sweep, worker = pair
    rules = StopRules(max_error_share=None)
    orders = [
        Job({"target": "http://a:1", "slo": ["x"]}, {"tokenizer": None}, "00", "salt", {"X": "y"}),
        LevelOrder(SPEC, rules, None, 0.0004, 7, Share(1, 3), tells=True),
        Start(12.000000001),
        Stop("timeout"),
        Ping(1 / 3),
    ]
    for each in orders:
        sweep.send(each)
    assert [worker.receive(type(each)) for each in orders] == orders
    answers = [Ready(), Ping(0.1, 0.2, 0.15, 0.3), Progress(0, "c", "running", 1, None, 0, 0.5, 9)]
    for each in answers:
        worker.send(each)
    assert [sweep.receive(type(each)) for each in answers] == answers


def test_a_part_keeps_every_bit_of_its_times_and_its_infinities(pair):
    sweep, worker = pair
    planned = PlannedRequest(4, 0.0, 8, 3)
    exchange = Exchange(0.1 + 0.2, (1 / 3, 2 / 3), array("q", (1, 2)), ttft_bound_s=1e-9 / 3)
    records = (
        RequestRecord.completed(planned, 1 / 7, exchange),
        RequestRecord.failed(planned, 0.5, TargetError("timeout", "late")),
    )
    signals = ReceiveSignals("kernel", "native", counted_by=Counter(server=2))
    signals.add_answer((1 / 3, 2 / 3), (math.inf, 1e-5 / 3))
    signals.delays_s.extend([math.inf, 0.25])
    sent = LevelPart(records, signals, LoopWatch([0.1 / 3], 0.5), "errors", fault="late")
    worker.send(sent)
    part = sweep.receive(LevelPart)
    assert part.signals + ReceiveSignals("kernel", "native") == signals
    assert (part.watch, part.stopped_by, part.fault) == (sent.watch, "errors", "late")
    first, second = part.records
    assert list(first.token_times_s) == [1 / 3, 2 / 3]
    assert list(first.exchange.token_counts) == [1, 2]
    assert (first.due_s, first.sent_s, first.output_tokens) == (1 / 7, 0.1 + 0.2, 3)
    assert first.exchange.ttft_bound_s == 1e-9 / 3
    assert (second.status, second.error) == ("timeout", "late")


def test_a_failure_is_raised_as_the_kind_of_error_it_was(pair):
    sweep, worker = pair
    worker.send(Failed("no such file", 2))
    with pytest.raises(InputError, match=r"^w: no such file"):
        sweep.receive(Ready)


def test_another_secret_is_named_on_both_sides_and_ends_the_connection():
    with sockets() as (sweep, worker):
        found = _greeted(sweep, worker, workers_secret=SECRET + "?")
    for side in ("sweep", "worker"):
        assert isinstance(found[side], InputError)
        assert "set the same LMI_BENCH_SECRET on both sides" in str(found[side])


def test_a_recorded_greeting_is_of_no_use_in_another_connection():
    """A stranger repeats what a worker with the secret has sent before, byte by byte."""
    with sockets() as (sweep, worker), sockets() as (again, thief):
        sent = []

        def record(data, write=worker._write):
            sent.append(data)
            write(data)

        worker._write = record
        assert _greeted(sweep, worker)["sweep"] == Ready(2)
        os.write(thief._sink.fileno(), b"lmi-bench worker greets\n")
        for data in sent:
            thief._write(data)
        with pytest.raises(InputError, match=r"not made with this secret, .* closed"):
            again.greet(SECRET)


@pytest.mark.parametrize("damage", ["bit", "again", "left out", "sent back", "no message"])
def test_a_message_that_is_changed_repeated_left_out_or_sent_back_is_refused(pair, damage):
    sweep, worker = pair
    sent = {sweep: [], worker: []}
    for side, messages in sent.items():
        side._write = messages.append
    for side in sent:
        side.send(Stop("one"))
        side.send(Stop("two"))
    first, second = sent[sweep]
    given = {
        "bit": [first[:-1] + bytes([first[-1] ^ 1])],
        "again": [first, first],
        "left out": [second],
        "sent back": sent[worker],
        "no message": [b"GET / HTTP/1.1\r\n"],
    }
    for data in given[damage]:
        Channel._write(sweep, data)
    with pytest.raises(InputError, match="the connection is closed"):
        [worker.receive(Stop) for _ in range(2)]


@pytest.mark.parametrize("side", [0, 1])
def test_other_versions_are_refused_with_both(side):
    with sockets() as ends:
        here, there = ends[side], ends[1 - side]
        os.write(there._sink.fileno(), f"lmi-bench {there._role} greets\n".encode())
        there._write(b"9.9 00")
        with pytest.raises(InputError, match=rf"[ws] has lmi-bench 9\.9, this is {__version__}: "):
            here.greet(SECRET)


def test_what_a_login_script_prints_before_the_greeting_is_passed_over():
    with sockets() as (sweep, worker):
        os.write(worker._sink.fileno(), b"Welcome to gpu1!\nlmi-bench worker is installed\nlmi-")
        assert _greeted(sweep, worker)["sweep"] == Ready(2)


def test_a_stranger_who_speaks_another_protocol_is_turned_away():
    with sockets() as (sweep, stranger):
        os.write(stranger._sink.fileno(), b"GET / HTTP/1.1\r\n" * 7000)
        with pytest.raises(InputError, match="w: it is no lmi-bench worker"):
            sweep.greet(SECRET)


def test_before_the_secret_is_shown_no_memory_is_taken_for_a_message():
    """A stranger who greets well and then announces a message of 128 MiB."""
    with sockets() as (sweep, stranger):
        os.write(stranger._sink.fileno(), b"lmi-bench worker greets\n")
        stranger._write(f"{__version__} 00".encode())
        os.write(stranger._sink.fileno(), b"\x08\0\0\0")
        stranger.close()
        tracemalloc.start()
        with pytest.raises(ClosedError):
            sweep.greet(SECRET)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 10_000_000


def test_a_connection_that_is_reset_is_closed(pair):
    sweep, worker = pair
    worker.close()
    with pytest.raises(ClosedError, match="w has closed the connection"):
        sweep.receive(Ready)


def test_every_message_has_a_kind():
    assert set(of_channel._KINDS) >= {b"Job", b"LevelOrder", b"LevelPart", b"Ping", b"Failed"}


def test_a_worker_ends_when_its_sweep_pings_no_more_in_a_level(pair, monkeypatch):
    """As when the sweep's host loses its power: the connection stays open, and says nothing."""
    monkeypatch.setattr(worker_jobs, "_GONE_S", 0.2)
    sweep, worker = pair

    class Answers:
        async def send(self, request):
            await asyncio.sleep(0.01)
            now_s = asyncio.get_running_loop().time()
            return Exchange(now_s - 0.01, (now_s,), (1,))

    _serves(sweep, worker, Answers())


def _serves(sweep, worker, target):
    """A worker that is told to begin an endless level, until it ends."""

    async def serve():
        async with asyncio.timeout(60):
            await worker_jobs._serve(worker, target, SyntheticPrompts([Lengths(8, 1)], no_text, seed=0))

    sweep.send(LevelOrder(LevelSpec(0, Load(concurrency=1), duration_s=1e6), StopRules(), None, 0.0, 0))
    sweep.send(Start(time.monotonic()))
    asyncio.run(serve())


def test_an_input_error_in_a_level_has_its_line_and_its_exit_code(pair):
    sweep, worker = pair
    heard = []

    class Refuses:
        async def send(self, request):
            async with asyncio.TaskGroup():
                raise InputError("too few open files")

    def listen():
        try:
            list(iter(sweep._next, None))
        except InputError as exc:
            heard.append(str(exc))
        sweep.close()

    listener = threading.Thread(target=listen)
    listener.start()
    _serves(sweep, worker, Refuses())
    listener.join()
    assert heard[0].startswith("w: too few open files")


def test_a_message_is_heard_when_it_reached_the_host_however_late_it_is_read():
    """The loop is busy for 0.3 s when the message comes; Linux knows when it came."""
    stamping = stamping_socket()
    if stamping is None:
        pytest.skip("this host's kernel does not say when a packet arrived")
    with stamping, socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
        with near, far:
            ends = sweep, worker = over(near, "w", "sweep"), over(far, "s", "worker")
    assert _greeted(sweep, worker)["sweep"] == Ready(2)
    heard = []

    async def main():
        worker.listen(lambda _: heard.append((worker.heard_s, time.monotonic())))
        for _ in range(20):
            before_s = time.monotonic()
            sweep.send(Ping(before_s))
            sent_s = time.monotonic()
            time.sleep(0.3)
            await asyncio.sleep(0.05)
            heard_s, read_s = heard.pop()
            assert before_s < heard_s
            assert read_s - sent_s > 0.29
            if heard_s - sent_s < 0.2:  # a busy machine's kernel starts to stamp late
                return
        pytest.fail("no message has the kernel's time")

    try:
        asyncio.run(main())
    finally:
        for end in ends:
            end.close()
