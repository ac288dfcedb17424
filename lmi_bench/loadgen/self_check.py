"""What the load generator says of itself: was the load that was asked for really offered?

A level that the generator could not hold is marked invalid, with who is to blame and what to do,
and is never reported in silence. In virtual time nothing can be late, so only the plan is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmi_bench.clock import is_virtual
from lmi_bench.records import GeneratorCheck, RequestRecord
from lmi_bench.units import s_to_ms
from lmi_bench.workload import LevelSpec

HEARTBEAT_S = 0.01
MAX_DELAY_SHARE = 0.05
"""Dispatch delay p99, as a share of the median latency, above which a level is invalid: what the
generator adds to the latency is then no longer small beside the latency."""
MIN_DELAY_S = 0.005
"""Delays below this are never held against the generator, however short the answers."""
MIN_ACHIEVED_SHARE = 0.95
"""Share of the asked rate that an open-loop level must have sent."""
MAX_MERGED_SHARE = 0.01
"""Share of the tokens that came together with a later one of their stream, above which their gaps
are unknown."""
MIN_MERGING_DELAY_S = 0.001
"""Receive delay p99 below which tokens that share a read were sent together by the server."""


@dataclass(frozen=True, slots=True)
class ReceiveSignals:
    """What a target's receiver saw during a level.

    timestamps       "kernel", "user" or "loop"
    delay_p99_s      p99 over the reads of user time - kernel time, or of its upper bound
    merged_share     share of the tokens that shared a read with a later one
    clock_steps      steps of the real-time clock, during which user time was taken
    """

    timestamps: str = "loop"
    delay_p99_s: float = 0.0
    merged_share: float = 0.0
    clock_steps: int = 0


class LoopWatch:
    """Lag of the loop's heartbeat and share of a core that its thread took."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.cpu_share = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop while the block runs; nothing to watch in virtual time."""
        if is_virtual():
            yield
            return
        loop = asyncio.get_running_loop()
        cpu_s, start_s = time.thread_time(), loop.time()
        beat = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beat.cancel()
            elapsed_s = loop.time() - start_s
            if elapsed_s > 0:
                self.cpu_share = (time.thread_time() - cpu_s) / elapsed_s

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self.lags_s.append(max(0.0, loop.time() - due_s))


def check_level(
    spec: LevelSpec,
    records: Sequence[RequestRecord],
    watch: LoopWatch,
    signals: ReceiveSignals,
) -> GeneratorCheck:
    """Judge a level by what it left; records in any order, times on one clock."""
    delays_s = sorted(max(0.0, record.sent_s - record.due_s) for record in records)
    delay_p99_s = quantile(delays_s, 0.99)
    reason = (
        _late(records, delay_p99_s, watch)
        or _missed_rate(spec, records, watch)
        or _merged(signals, watch)
    )
    return GeneratorCheck(
        dispatch_delay_p50_s=quantile(delays_s, 0.5),
        dispatch_delay_p99_s=delay_p99_s,
        dispatch_delay_max_s=delays_s[-1] if delays_s else 0.0,
        loop_lag_p99_s=quantile(sorted(watch.lags_s), 0.99),
        cpu_share=watch.cpu_share,
        timestamps=signals.timestamps,
        receive_delay_p99_s=signals.delay_p99_s,
        merged_share=signals.merged_share,
        valid=reason is None,
        reason=reason,
    )


def _late(records: Sequence[RequestRecord], delay_p99_s: float, watch: LoopWatch) -> str | None:
    latencies_s = sorted(
        record.token_times_s[-1] - record.sent_s for record in records if record.token_times_s
    )
    median_s = quantile(latencies_s, 0.5)
    if delay_p99_s <= max(MIN_DELAY_S, MAX_DELAY_SHARE * median_s):
        return None
    return (
        f"client: requests left {s_to_ms(delay_p99_s):.1f} ms late (p99; median latency "
        f"{s_to_ms(median_s):.1f} ms, share of a core {watch.cpu_share:.2f}); run the generator on "
        "an idle core or ask for less load"
    )


def _missed_rate(spec: LevelSpec, records: Sequence[RequestRecord], watch: LoopWatch) -> str | None:
    if spec.rate_per_s is None or len(records) < 2:
        return None
    due_span_s = max(r.due_s for r in records) - min(r.due_s for r in records)
    sent_span_s = max(r.sent_s for r in records) - min(r.sent_s for r in records)
    if sent_span_s <= 0 or due_span_s / sent_span_s >= MIN_ACHIEVED_SHARE:
        return None
    achieved_per_s = spec.rate_per_s * due_span_s / sent_span_s
    return (
        f"client: {achieved_per_s:.4g} req/s sent of the {spec.rate_per_s:g} asked for (share of "
        f"a core {watch.cpu_share:.2f}); lower the rate or give the generator a faster core"
    )


def _merged(signals: ReceiveSignals, watch: LoopWatch) -> str | None:
    if signals.merged_share <= MAX_MERGED_SHARE or signals.delay_p99_s < MIN_MERGING_DELAY_S:
        return None
    return (
        f"client: {signals.merged_share:.1%} of the tokens were read together with a later one of "
        f"their stream (share of a core {watch.cpu_share:.2f}), so their gaps are unknown; "
        "lower the load or give the generator a core of its own"
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear quantile of ordered values; 0.0 of none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
