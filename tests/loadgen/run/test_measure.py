"""One request: every way it can end is a record, but for a cancellation and a bug."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.outcome import UndecodedAnswer, cancelled
from lmi_bench.loadgen.run.target import Resolved
from tests.loadgen.sending import measure

REQUEST = PlannedRequest(0, 0.0, 8, 4)


class Endless:
    """Sends a token a second and never ends; keeps what came when it is cut off."""

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s, times = loop.time(), []
        try:
            while True:
                await asyncio.sleep(1.0)
                times.append(loop.time())
        except asyncio.CancelledError as exc:
            raise cancelled(Exchange(sent_s, tuple(times))) from exc


def test_an_endless_answer_is_a_time_out_after_60_s_by_default():
    async def main():
        loop = asyncio.get_running_loop()
        record = (await measure(Resolved(Endless()).send, REQUEST, 0.0)).record()
        return record, loop.time()

    record, now_s = run_virtual(main())
    assert now_s == pytest.approx(60.0)
    assert record.status == "timeout"
    assert "60 s" in record.error


def test_a_time_out_keeps_the_tokens_that_came():
    record = run_virtual(measure(Resolved(Endless()).send, REQUEST, 0.0, timeout_s=3.5)).record()
    assert record.token_times_s == pytest.approx((1.0, 2.0, 3.0))
    assert record.output_tokens == 3
    assert record.ended_s == pytest.approx(3.5)


def test_a_time_out_that_python_3_11_2_raises_keeps_them_too(monkeypatch):
    """It is raised without the cancelled request as its cause, which is its context alone."""
    original = asyncio.Timeout.__aexit__

    async def as_in_3_11_2(self, *exc_info):
        try:
            return await original(self, *exc_info)
        except TimeoutError as exc:
            exc.__cause__ = None
            raise

    monkeypatch.setattr(asyncio.Timeout, "__aexit__", as_in_3_11_2)
    record = run_virtual(measure(Resolved(Endless()).send, REQUEST, 0.0, timeout_s=3.5)).record()
    assert record.token_times_s == pytest.approx((1.0, 2.0, 3.0))


def test_the_wall_of_a_level_holds_the_wait_for_an_answer_that_never_came():
    """10 tokens in a second, then a minute of silence: 10 tokens in 61 s, not in one."""

    class Mute:
        async def send(self, request):
            await asyncio.sleep(3600)

    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0)
        record = (await measure(Resolved(Mute()).send, REQUEST, loop.time())).record()
        answered = RequestRecord(1, 0.0, Exchange(0.0, (1.0,), (10,)))
        return columns_of([answered, record]).wall_s

    assert run_virtual(main()) == pytest.approx(61.0)


def test_a_cancellation_passes_through():
    async def main():
        task = asyncio.create_task(measure(Resolved(Endless()).send, REQUEST, 0.0))
        await asyncio.sleep(2.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


def test_a_refused_request_is_a_record_and_a_bug_is_not():
    class Refuses:
        async def send(self, request):
            raise TargetError("overloaded", "queue full")

    class Buggy:
        async def send(self, request):
            raise KeyError("oops")

    measured = run_virtual(measure(Resolved(Refuses()).send, REQUEST, 0.0))
    assert (measured.known_status, measured.record().error) == ("overloaded", "queue full")
    with pytest.raises(KeyError):
        run_virtual(measure(Resolved(Buggy()).send, REQUEST, 0.0))


def test_an_answer_is_decoded_once_and_only_when_it_is_asked_for():
    decoded = []

    def decode():
        decoded.append(1)
        return Exchange(0.0, (1.0, 2.0))

    class Defers:
        async def send(self, request):
            raise AssertionError("the undecoded way is there")

        async def send_undecoded(self, request):
            return UndecodedAnswer(ended_s=2.0, num_events=2, decode=decode)

    measured = run_virtual(measure(Resolved(Defers()).send, REQUEST, 0.0))
    assert decoded == []
    assert measured.num_tokens == 2
    assert measured.record() is measured.record()
    assert decoded == [1]


def test_what_only_decoding_shows_is_a_failure_too():
    def decode():
        raise TargetError("server_error", "CUDA out of memory", exchange=Exchange(0.0, (1.0,)))

    class Defers:
        async def send(self, request):
            raise AssertionError

        async def send_undecoded(self, request):
            return UndecodedAnswer(ended_s=2.0, num_events=2, decode=decode)

    measured = run_virtual(measure(Resolved(Defers()).send, REQUEST, 0.0))
    assert measured.known_status == "ok"
    assert measured.record().status == "server_error"
    assert tuple(measured.record().token_times_s) == (1.0,)
