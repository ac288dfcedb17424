"""The closed loop: a user sends when its last answer has ended, not before and not later."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import ClosedLoop, PlannedRequest
from lmi_bench.loadgen.run.loops import run_closed_loop
from lmi_bench.loadgen.run.sender import Sender


class Counting:
    """Answers after `seconds`, and knows how many requests it ever held at once."""

    def __init__(self, seconds=1.0):
        self.seconds = seconds
        self.running = 0
        self.most = 0

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return Exchange(sent_s, (loop.time(),))


def _run(target, users, **options):
    async def main():
        measured = await run_closed_loop(
            Sender(target.send),
            users,
            lambda index: PlannedRequest(index, 0.0, 8, 1),
            start_s=asyncio.get_running_loop().time(),
            **options,
        )
        return [item.record() for item in measured]

    return run_virtual(main())


def test_each_user_sends_as_soon_as_it_is_free():
    """Three users, nine requests of one second: three rounds."""
    target = Counting()
    records = _run(target, ClosedLoop(concurrency=3, num_requests=9))
    assert target.most == 3
    assert [record.request_id for record in records] == list(range(9))
    assert [record.sent_s for record in records] == pytest.approx([0.0] * 3 + [1.0] * 3 + [2.0] * 3)
    assert all(record.sent_s == record.due_s for record in records)


def test_more_users_than_requests_send_what_there_is():
    assert len(_run(Counting(), ClosedLoop(concurrency=8, num_requests=3))) == 3


def test_a_million_users_with_three_requests_are_three_tasks():
    class Tasks(Counting):
        async def send(self, request):
            assert len(asyncio.all_tasks()) < 10
            return await super().send(request)

    assert len(_run(Tasks(), ClosedLoop(concurrency=10**6, num_requests=3), spacing_s=0.01)) == 3


def test_spacing_sets_users_apart():
    records = _run(Counting(), ClosedLoop(concurrency=4, num_requests=4), spacing_s=0.1)
    assert [record.sent_s for record in records] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [record.due_s for record in records] == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_duration_ends_the_sending_and_lets_answers_finish():
    """One user, answers of one second, 2.5 s: sent at 0, 1 and 2; the last ends at 3."""
    records = _run(Counting(), ClosedLoop(concurrency=1, num_requests=None, duration_s=2.5))
    assert [record.token_times_s[0] for record in records] == pytest.approx([1.0, 2.0, 3.0])


def test_told_to_stop_no_user_sends_again():
    """Request 3 ends just after its neighbour's user has taken request 4, the last."""
    records = _run(
        Counting(),
        ClosedLoop(concurrency=2, num_requests=100),
        on_ended=lambda measured: measured.request.request_id < 3,
    )
    assert len(records) == 5


def test_the_next_request_is_due_when_the_answer_ended_not_when_it_was_noticed():
    class LateNotice:
        """The answer's last byte came half a second before the loop heard of it."""

        async def send(self, request):
            loop = asyncio.get_running_loop()
            sent_s = loop.time()
            await asyncio.sleep(1.0)
            return Exchange(sent_s, (loop.time() - 0.5,), ended_s=loop.time() - 0.5)

    first, second = _run(LateNotice(), ClosedLoop(concurrency=1, num_requests=2))
    assert second.due_s == pytest.approx(0.5)
    assert second.sent_s == pytest.approx(1.0)
    assert first.due_s == 0.0
