"""Retries as AWS's SDKs do them: few, counted, and never hidden from the latency."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.outcome import UndecodedAnswer, cancelled
from lmi_bench.loadgen.run.retry import RetryingTarget
from lmi_bench.loadgen.run.target import Resolved
from tests.loadgen.sending import measure

REQUEST = PlannedRequest(0, 0.0, 8, 1)


class Failing:
    """Fails with the given errors first, each after a second; answers in a second."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.sent_s = []

    async def send_undecoded(self, request):
        now_s = asyncio.get_running_loop().time()
        self.sent_s.append(now_s)
        await asyncio.sleep(1.0)
        if self.errors:
            error = self.errors.pop(0)
            error.exchange = error.exchange or Exchange(now_s)
            raise error
        exchange = Exchange(now_s, (now_s + 1.0,))
        return UndecodedAnswer(now_s + 1.0, 1, lambda: exchange)


def _record(server, draw=lambda: 0.5):
    target = RetryingTarget(server, draw)
    return run_virtual(measure(Resolved(target).send, REQUEST, 0.0)).record()


def test_the_latency_runs_from_the_first_send_and_the_retries_are_counted():
    """Sent at 0, 1.5 and 3.5 s: back-off 0.5 * 1 and 0.5 * 2 after answers of a second."""
    server = Failing(TargetError("throttled", "HTTP 429"), TargetError("overloaded", "HTTP 503"))
    record = _record(server)
    assert server.sent_s == [0.0, 1.5, 3.5]
    assert (record.status, record.exchange.retries, record.sent_s) == ("ok", 2, 0.0)
    assert tuple(record.token_times_s) == (4.5,)


def test_the_third_failure_is_the_answer():
    server = Failing(*(TargetError("overloaded", f"HTTP 503: {i}") for i in range(3)))
    record = _record(server)
    assert (record.status, record.exchange.retries, record.error) == ("overloaded", 2, "HTTP 503: 2")
    assert len(server.sent_s) == 3


@pytest.mark.parametrize(
    "error",
    [
        TargetError("client_error", "HTTP 400"),
        TargetError("server_error", "HTTP 424: the model failed"),
        TargetError("broken_stream", "closed", exchange=Exchange(0.0, (0.5,))),
        TargetError("overloaded", "in the stream", exchange=Exchange(0.0, (0.5,))),
    ],
    ids=lambda error: str(error),
)
def test_what_another_attempt_cannot_mend_is_not_tried_again(error):
    server = Failing(error)
    assert _record(server).exchange.retries == 0
    assert len(server.sent_s) == 1


@pytest.mark.parametrize("timeout_s", [1.2, 2.2])
def test_a_request_that_is_given_up_counts_its_retries_from_its_first_send(timeout_s):
    """After 1 s the first failure, after 1.5 s the retry: cut off in the back-off or in the retry,
    of which the target itself keeps what came."""

    class Cut(Failing):
        async def send_undecoded(self, request):
            now_s = asyncio.get_running_loop().time()
            try:
                return await super().send_undecoded(request)
            except asyncio.CancelledError as exc:
                raise cancelled(Exchange(now_s, (now_s + 0.5,))) from exc

    server = Cut(TargetError("throttled", "HTTP 429"), TargetError("throttled", "HTTP 429"))
    target = RetryingTarget(server, lambda: 0.5)
    record = run_virtual(measure(Resolved(target).send, REQUEST, 0.0, timeout_s=timeout_s)).record()
    assert (record.status, record.sent_s, record.ended_s) == ("timeout", 0.0, timeout_s)
    assert record.exchange.retries == len(server.sent_s) - 1 == (0 if timeout_s < 1.5 else 1)
    assert tuple(record.token_times_s) == (() if timeout_s < 1.5 else (2.0,))


def test_a_first_try_that_succeeds_counts_none():
    assert _record(Failing()).exchange.retries == 0


def test_a_server_that_fails_everyone_is_soon_left_alone():
    """A quota of 500 at 5 a retry: 100 retries for 100 requests that would like 200."""

    async def main():
        server = Failing(*(TargetError("overloaded", "HTTP 503") for _ in range(1000)))
        target = RetryingTarget(server, lambda: 0.5)
        for _ in range(100):
            await measure(Resolved(target).send, REQUEST, 0.0)
        return len(server.sent_s)

    assert run_virtual(main()) == 200
