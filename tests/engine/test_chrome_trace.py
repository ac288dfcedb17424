"""The trace says when each step ran and where each request's time went."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.chrome_trace import ChromeTrace
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor


class StepTimes:
    """1 s for a prefill, 0.1 s for a decode step."""

    def step_time_s(self, shape):
        return 1.0 if shape.prefill_sequences else 0.1


def trace(path, *, close=True, drafter=None):
    """Two requests of 3 tokens, one at a time: the second one waits for 1.2 s."""

    async def main():
        executor = SimulatedExecutor(StepTimes(), draft_acceptance=1.0)
        config = SchedulerConfig(num_blocks=9, policy="none")
        engine = AsyncEngine(Scheduler(config, drafter=drafter), executor, on_step=tracer.on_step, on_end=tracer.on_end)
        async with engine:
            both = [engine.submit(range(5), SamplingParams(max_new_tokens=3)) for _ in range(2)]
            await asyncio.gather(*(each.wait() for each in both))
        return both

    tracer = ChromeTrace(path)
    with tracer if close else nullcontext():
        generations = run_virtual(main())
    return tracer, generations


def spans(path):
    events = [event for event in json.loads(path.read_text()) if event.get("ph") == "X"]
    return [(e["pid"], e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events]


def test_steps_stand_one_after_the_other_with_their_kind(tmp_path):
    trace(tmp_path / "trace.json")
    steps = [span for span in spans(tmp_path / "trace.json") if span[0] == 1]
    expected = [("prefill", 0.0, 1.0), ("decode", 1.0, 0.1), ("decode", 1.1, 0.1)]
    expected += [(name, start_s + 1.2, seconds) for name, start_s, seconds in expected]
    assert [step[2] for step in steps] == [name for name, _, _ in expected]
    for step, (_, start_s, seconds) in zip(steps, expected, strict=True):
        assert step[3:] == pytest.approx((start_s, seconds))


def test_a_request_is_seen_in_the_queue_in_prefill_and_in_decode(tmp_path):
    _, generations = trace(tmp_path / "trace.json")
    second = [span[2:] for span in spans(tmp_path / "trace.json") if span[:2] == (2, 1)]
    assert [span[0] for span in second] == ["queue", "prefill", "decode"]
    for got, (start_s, seconds) in zip(second, [(0.0, 1.2), (1.2, 1.0), (2.2, 0.2)], strict=True):
        assert got[1:] == pytest.approx((start_s, seconds))
    late = generations[1]
    assert (late.queue_s, late.prefill_s, late.decode_s) == pytest.approx((1.2, 1.0, 0.2))


def test_verified_steps_say_how_much_was_drafted(tmp_path):
    trace(tmp_path / "trace.json", drafter=ExecutorDrafter(4))
    events = json.loads((tmp_path / "trace.json").read_text())
    verified = [event for event in events if event.get("name") == "verify"]
    assert [event["args"]["drafted_tokens"] for event in verified] == [1, 1]  # one of 2 left
    request = next(event for event in events if event.get("name") == "queue")
    assert (request["args"]["drafted_tokens"], request["args"]["accepted_tokens"]) == (1, 1)


def test_what_was_written_before_a_kill_can_be_read(tmp_path):
    tracer, _ = trace(tmp_path / "trace.json", close=False)
    tracer._file.flush()
    text = (tmp_path / "trace.json").read_text()
    assert len(json.loads(text.rstrip().rstrip(",") + "]")) == 2 + 6 + 6
    tracer._file.close()


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InputError, match="--step-trace: cannot write"):
        ChromeTrace(tmp_path / "absent" / "trace.json")
