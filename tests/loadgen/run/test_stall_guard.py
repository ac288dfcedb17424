"""A level without a time-out ends although one of its answers does not."""

from __future__ import annotations

import asyncio

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import ClosedLoop, PlannedRequest
from lmi_bench.loadgen.run.loops import run_closed_loop
from lmi_bench.loadgen.run.sender import Sender, StallGuard


class Answers:
    """Each answer takes as many seconds as its number in the list; None never ends."""

    def __init__(self, *seconds: float | None) -> None:
        self.seconds = seconds

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        wait_s = self.seconds[request.request_id]
        if wait_s is None:
            await asyncio.Event().wait()
        await asyncio.sleep(wait_s)
        return Exchange(sent_s, token_times_s=(loop.time(),))


def ended(answers, *, users, output_tokens=1):
    """(status, when its user was free) of each request of a level without a time-out."""
    measured = run_virtual(
        run_closed_loop(
            Sender(answers.send, timeout_s=None, guard=StallGuard()),
            ClosedLoop(concurrency=users, num_requests=len(answers.seconds)),
            lambda number: PlannedRequest(number, 0.0, 8, output_tokens),
            start_s=0.0,
        )
    )
    return [(item.record().status, item.ended_s) for item in measured]


def test_an_answer_that_never_ends_is_given_up_after_five_quiet_minutes():
    """The others end at 1 and 2 s; nothing ends for 300 s after that."""
    assert ended(Answers(None, 1.0, 1.0), users=2) == [("timeout", 302.0), ("ok", 1.0), ("ok", 2.0)]


def test_a_server_whose_answers_take_long_gets_ten_times_as_long():
    """The longest answer took 100 s, so the quiet lasts 1,000 s."""
    assert ended(Answers(None, 100.0), users=2) == [("timeout", 1100.0), ("ok", 100.0)]


def test_long_answers_get_two_seconds_a_token():
    assert ended(Answers(1900.0), users=1, output_tokens=1000) == [("ok", 1900.0)]
    assert ended(Answers(None), users=1, output_tokens=1000) == [("timeout", 2000.0)]


def test_slow_answers_that_do_end_are_never_given_up():
    """Each takes longer than five minutes, but one ends every 200 s."""
    answers = Answers(*(400.0 + 200 * place for place in range(5)))
    assert [status for status, _ in ended(answers, users=5, output_tokens=220)] == ["ok"] * 5


def test_the_guard_rests_while_nothing_is_in_flight():
    async def idle():
        guard = StallGuard()
        limit = asyncio.timeout(None)
        guard.began(limit, 1)
        guard.ended(limit, 1.0)
        await asyncio.sleep(10_000)
        return guard.gave_up_after_s

    assert run_virtual(idle()) is None
