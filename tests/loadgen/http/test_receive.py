"""Clocks and selector: the kernel's time on the loop's clock."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time

import pytest

from lmi_bench.loadgen.http.connection import is_here
from lmi_bench.loadgen.http.kernel_time import KernelClock, clock_offset_ns
from lmi_bench.loadgen.http.receive import priority_asked, run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.wire.format import find_format


def _control(real_ns: int) -> bytes:
    return struct.pack("@ll", *divmod(real_ns, 1_000_000_000))


def test_the_offset_of_the_clocks_is_known_to_microseconds():
    at_ns, offset_ns, width_ns = clock_offset_ns()
    assert 0 <= width_ns < 1_000_000
    assert abs(time.time_ns() - (time.monotonic_ns() + offset_ns)) < 1_000_000
    assert abs(time.monotonic_ns() - at_ns) < 1_000_000_000


def test_a_kernel_stamp_becomes_monotonic_time():
    clock = KernelClock()
    clock.sample()
    stamp_ns, now_ns = time.time_ns(), time.monotonic_ns()
    seen_ns = clock.monotonic_ns(_control(stamp_ns), now_ns + 1000)
    assert seen_ns == pytest.approx(now_ns, abs=200_000)


def test_a_stamp_after_the_read_or_none_at_all_falls_back():
    clock = KernelClock()
    clock.sample()
    now_ns = time.monotonic_ns()
    assert clock.monotonic_ns(None, now_ns) is None
    assert clock.monotonic_ns(b"short", now_ns) is None
    assert clock.monotonic_ns(_control(time.time_ns() + 10**9), now_ns) is None


def test_a_step_of_the_real_time_clock_falls_back_in_its_interval_only(monkeypatch):
    clock = KernelClock()
    samples = iter([(1_000, 500, 9), (2_000, 500, 9), (3_000, 10**9 + 500, 9), (4_000, 10**9 + 500, 9)])
    monkeypatch.setattr("lmi_bench.loadgen.http.kernel_time.clock_offset_ns", lambda: next(samples))
    for _ in range(4):
        clock.sample()
    assert clock.steps == 1
    assert clock.monotonic_ns(_control(1_500 + 500), 1_600) == 1_500
    assert clock.monotonic_ns(_control(2_500 + 500), 2_600) is None
    assert clock.monotonic_ns(_control(3_500 + 10**9 + 500), 3_600) == 3_500


def test_the_loop_still_serves_ordinary_sockets_timers_and_threads():
    async def main():
        async def echo(reader, writer):
            writer.write(await reader.readline())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"hello\n")
        line = await reader.readline()
        writer.close()
        server.close()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await asyncio.sleep(0.02)
        slept_s = loop.time() - start_s
        return line, slept_s, await asyncio.to_thread(lambda: 7)

    line, slept_s, seven = run_on_sockets(main())
    assert (line, seven) == (b"hello\n", 7)
    assert slept_s >= 0.02


def _refused(*_):
    raise PermissionError


@pytest.mark.skipif(sys.platform != "linux", reason="SCHED_FIFO is Linux's")
@pytest.mark.parametrize("refuses", [(), ("sched_setscheduler",), ("sched_setscheduler", "setpriority")])
def test_a_receiver_has_the_highest_priority_that_is_granted_and_says_which(refuses, monkeypatch):
    def seen():
        policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        return policy, os.getpriority(os.PRIO_PROCESS, 0)

    before = seen()
    for name in refuses:
        monkeypatch.setattr(os, name, _refused)
    with priority_asked(True) as granted:
        during = seen()
    expected = {
        "SCHED_FIFO 1": (os.SCHED_FIFO, before[1]),
        "nice -10": (os.SCHED_OTHER, -10),
        "normal: not permitted": before,
    }
    assert during == expected[granted]
    assert granted in list(expected)[len(refuses) :]
    monkeypatch.undo()
    assert seen() == before
    with priority_asked(False) as granted:
        assert (granted, seen()) == ("normal", before)


def test_a_priority_that_the_process_was_given_stays():
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
    except PermissionError:
        pytest.skip("this user may not ask for real time")
    try:
        with priority_asked(True) as granted:
            assert (granted, os.sched_getparam(0).sched_priority) == ("as the process has it", 5)
        assert os.sched_getscheduler(0) == os.SCHED_RR
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_real_time_is_asked_for_where_the_server_does_not_need_this_machine():
    tcp = socket.AF_INET
    assert is_here((tcp, ("127.0.0.1", 80)))
    assert is_here((socket.AF_UNIX, "/run/server.sock"))
    assert not is_here((tcp, ("192.0.2.1", 80)))  # of a network for examples alone

    async def level(priority, found):
        async with HttpTarget("http://server.invalid", find_format("openai"), model="m", priority=priority) as target:
            target._found = found
            await target.open_level(0)
            return target.end_level().priority

    for priority, host, is_asked in (
        (None, "127.0.0.1", False),
        (None, "192.0.2.1", True),
        ("normal", "192.0.2.1", False),
        ("realtime", "127.0.0.1", True),
    ):
        granted = run_on_sockets(level(priority, [(tcp, (host, 80))]))
        assert (granted != "normal") == is_asked
    assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER
