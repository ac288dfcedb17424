"""The open loop: the due time decides."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.run.loops import run_open_loop
from lmi_bench.loadgen.run.sender import Sender


class Slow:
    """Answers with one token after ten seconds."""

    async def send(self, request):
        sent_s = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        return Exchange(sent_s, token_times_s=(sent_s + 10,))


class OneAtATime:
    """A server of 500 ms that works on one request at a time and queues the rest."""

    def __init__(self):
        self._lock = asyncio.Lock()

    async def send(self, request):
        sent_s = asyncio.get_running_loop().time()
        async with self._lock:
            await asyncio.sleep(0.5)
            return Exchange(sent_s, (asyncio.get_running_loop().time(),))


def _plan(*arrivals_s: float) -> list[PlannedRequest]:
    return [PlannedRequest(index, at_s, 8, 1) for index, at_s in enumerate(arrivals_s)]


def _run(target, plan, **options):
    async def main():
        start_s = asyncio.get_running_loop().time()
        measured = await run_open_loop(Sender(target.send), plan, start_s=start_s, **options)
        return [item.record() for item in measured]

    return run_virtual(main())


def test_a_slow_answer_does_not_delay_the_next_send():
    """The second request leaves on time although the first takes ten seconds."""
    first, second = _run(Slow(), _plan(0.0, 1.0))
    assert second.sent_s - first.sent_s == pytest.approx(1.0)
    assert second.token_times_s[0] - second.due_s == pytest.approx(10.0)


def test_a_queue_in_the_server_is_counted_from_the_due_time():
    """Eight requests at 10/s, 0.5 s each one by one: request i ends at 0.5 (i + 1), due 0.1 i."""
    records = _run(OneAtATime(), _plan(*(0.1 * i for i in range(8))))
    latencies_s = [record.token_times_s[0] - record.due_s for record in records]
    assert latencies_s == pytest.approx([0.5 * (i + 1) - 0.1 * i for i in range(8)])


def test_due_times_are_absolute():
    """Making the first request takes the loop 0.3 s, yet the next are due at 1 and 2 s."""

    async def main():
        loop = asyncio.get_running_loop()

        def slow_plan():
            for request in _plan(0.0, 1.0, 2.0):
                if request.request_id == 0:
                    loop.virtual.now_s += 0.3
                yield request

        measured = await run_open_loop(Sender(Slow().send), slow_plan(), start_s=loop.time())
        return [item.record() for item in measured]

    records = run_virtual(main())
    assert [record.sent_s for record in records] == pytest.approx([0.3, 1.0, 2.0])
    assert [record.due_s for record in records] == pytest.approx([0.0, 1.0, 2.0])


def test_told_to_stop_it_sends_no_more_and_lets_the_rest_finish():
    class FailsFirst:
        async def send(self, request):
            if request.request_id == 0:
                await asyncio.sleep(1.5)
                raise TargetError("timeout", "too slow")
            return await Slow().send(request)

    records = _run(
        FailsFirst(), _plan(0.0, 1.0, 2.0, 3.0), on_ended=lambda measured: measured.known_status != "timeout"
    )
    assert [record.status for record in records] == ["timeout", "ok"]


def test_the_plan_is_only_read_as_far_as_time_has_come():
    def endless():
        for index in range(10**9):
            yield PlannedRequest(index, 0.8 * index, 8, 1)

    records = _run(Slow(), endless(), on_ended=lambda measured: measured.request.request_id < 2)
    assert len(records) == 15  # request 2 ends at 11.6 s; number 14 was due at 11.2
