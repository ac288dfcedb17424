"""The load generator's self-check: was the requested load really offered?

A level that the generator could not sustain is marked invalid, with the cause and what to do,
and is never reported in silence. In virtual time nothing can be late, so only the plan is checked.

By how much the reported latencies may be wrong because of the generator itself: each time is known
to lie in an interval, a send between the clock before and after the system call, a receive between
the last moment at which nothing had come and its stamp. So each latency has a lowest and a highest
value, and a quantile of the true ones lies between the quantiles of the two: a bound, not an
estimate, of what the generator adds. What it cannot see is outside it: queueing in the network and
in the server before the request is read.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmi_bench.core.clock import is_virtual
from lmi_bench.core.level import GENERATOR_LIMITED, GeneratorReport
from lmi_bench.core.records import RequestRecord, counted
from lmi_bench.core.units import s_to_ms
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals

HEARTBEAT_S = 0.01
MAX_DELAY_SHARE = 0.05
"""Dispatch delay p99, as a share of the median latency, above which a level is invalid: what the
generator adds to the latency is then no longer small beside the latency."""
MIN_DELAY_S = 0.005
"""Delays below this never make a level invalid, however short the answers."""
MIN_ACHIEVED_SHARE = 0.95
"""Share of the requested rate that an open-loop level must have sent."""
MAX_UNSURE_FIRST_SHARE = 0.001
"""Share of the first tokens that a late read hid among later ones, above which TTFT is unknown."""
MAX_UNSURE_FIRSTS = 2
"""Up to two hidden first tokens are too few for a rate; judge them by their effect on TTFT."""
MAX_BOUND_SHARE = 0.05
"""Error bound of a TTFT figure, as a share of it, above which a level is invalid."""
MAX_TAIL_BOUND_SHARE = 0.25
"""The same for the p99 of a level with too few requests to report it: it is nearly the maximum."""
MIN_BOUND_S = 0.001
"""Bounds below this never make a level invalid."""
UNSURE_S = 0.001
"""A token whose time may be further off than this because a later one was read with it counts as
merged by the reader; below it the server sent both at once."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """A reported quantile or mean and the interval of the true one; seconds."""

    reported_s: float
    low_s: float
    high_s: float

    @property
    def error_s(self) -> float:
        """Largest distance of the true figure from the reported one."""
        return max(self.reported_s - self.low_s, self.high_s - self.reported_s)

    @property
    def error_frac(self) -> float:
        """The same as a share of the reported one."""
        return self.error_s / self.reported_s if self.reported_s > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """Latencies as reported, and the interval of each true one; shape (n,), seconds.

    low_s, high_s  -inf and inf where an end is not known
    """

    values_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray

    def quantile(self, q: float) -> Bound | None:
        """The bound of a quantile; None if it is not known."""
        if not self.values_s.size:
            return None
        low, high = _bound_quantile(self.low_s, q), _bound_quantile(self.high_s, q)
        if not math.isfinite(low) or not math.isfinite(high):
            return None
        reported = float(np.quantile(self.values_s, q))
        return Bound(reported, min(low, reported), max(high, reported))

    def mean(self) -> Bound | None:
        """The bound of the mean of those with a known lowest value; None if there is none.

        No value is below zero, however late its read was, and none above the reported one.
        """
        known = np.isfinite(self.low_s)
        values_s = self.values_s[known].tolist()
        if not values_s:
            return None
        mean = sum(values_s) / len(values_s)
        low = sum(np.maximum(0.0, self.low_s[known]).tolist()) / len(values_s)
        return Bound(mean, low, mean)


def _bound_quantile(values: FloatArray, q: float) -> float:
    """The linear quantile; without interpolation if a value is infinite."""
    if np.isfinite(values).all():
        return float(np.quantile(values, q))
    return float(np.quantile(values, q, method="inverted_cdf"))


def ttfts(ttft_s: Sequence[float], bounds_s: Sequence[float | None]) -> Latencies:
    """The TTFT of each answer; `bounds_s`: by how much it may be too long, None: not known."""
    values = np.asarray(ttft_s, dtype=np.float64)
    late = np.asarray([math.inf if b is None else b for b in bounds_s], dtype=np.float64)
    return Latencies(values, values - late, values)


def gaps(signals: ReceiveSignals) -> Latencies:
    """The gaps between the token events of each stream.

    A gap is too long by its end, too short by its beginning.
    """
    times = np.asarray(signals.times_s)
    late = np.asarray(signals.late_s)
    within = _within(signals)
    gap = np.diff(times)[within]
    return Latencies(gap, gap - late[1:][within], gap + late[:-1][within])


def unsure_shares(signals: ReceiveSignals) -> tuple[float, float]:
    """Shares of the tokens, and of the first tokens, whose time a later token's read hides."""
    if not signals.tokens:
        return 0.0, 0.0
    times = np.asarray(signals.times_s)
    late = np.asarray(signals.late_s)
    hidden = np.zeros(times.size, dtype=bool)
    hidden[:-1] = _within(signals) & (np.diff(times) == 0)
    hidden &= (late > UNSURE_S) & np.isfinite(late)
    events = np.asarray(signals.events, dtype=np.int64)
    starts = np.cumsum(events) - events
    first = hidden[starts[events > 0]]
    return float(hidden.mean()), float(first.mean())


def _within(signals: ReceiveSignals) -> NDArray[np.bool_]:
    """Which neighbours in `times_s` belong to one stream; shape (tokens - 1,)."""
    within = np.ones(max(0, signals.tokens - 1), dtype=bool)
    ends = np.cumsum(np.asarray(signals.events, dtype=np.int64)) - 1
    within[ends[(ends >= 0) & (ends < within.size)]] = False
    return within


@dataclass(slots=True)
class LoopWatch:
    """Lag of the loop's heartbeat and share of a core that its thread took."""

    lags_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    virtual: bool = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop while the block runs; nothing to watch in virtual time."""
        self.virtual = is_virtual()
        if self.virtual:
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

    def late_frac(self) -> float:
        """Share of the last second or more that the heartbeat was late; 0.0 before one is over."""
        beats = round(1 / HEARTBEAT_S)
        late_s = sum(self.lags_s[-beats:])
        return late_s / (late_s + 1.0) if len(self.lags_s) >= beats else 0.0

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self.lags_s.append(max(0.0, loop.time() - due_s))


def check_level(
    spec: LevelSpec, records: Sequence[RequestRecord], watch: LoopWatch, signals: ReceiveSignals, *, workers: int = 1
) -> GeneratorReport:
    """Judge a level by its records (in any order, times on one clock) and the generator's signals.

    watch  of the busiest worker, if there are several
    """
    delays_s = [max(0.0, each.sent_s - each.due_s - each.exchange.held_s) for each in records]
    asked, achieved = _loads(spec, records)
    ttft = _ttfts(records, virtual=watch.virtual)
    check = GeneratorReport(
        dispatch_delay_p50_s=_quantile(delays_s, 0.5),
        dispatch_delay_p99_s=_quantile(delays_s, 0.99),
        dispatch_delay_max_s=max(delays_s, default=0.0),
        loop_lag_p99_s=_quantile(watch.lags_s, 0.99),
        cpu_share=watch.cpu_share,
        timestamps=signals.timestamps,
        receiver=signals.receiver,
        token_counts=", ".join(name for name, n in signals.counted_by.most_common() if n),
        asked_load=asked,
        achieved_load=achieved,
        workers=workers,
        priority=signals.priority or None,
        **_receive_facts(ttft, signals),
    )
    hidden = round((check.unsure_first_share or 0.0) * sum(count > 0 for count in signals.events))
    another = signals.other_model and f"answers came of the model {signals.other_model}"
    reason = (
        _plan_too_small(spec)
        or (another and f"server: {another}; measure each model in a run of its own")
        or _late(records, check)
        or _missed_rate(spec, records, check)
        or _limited(check, hidden, _ttft_doubt(ttft))
    )
    return replace(check, valid=reason is None, reason=reason)


def _loads(spec: LevelSpec, records: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    """Requested and achieved load: req/s, or mean users in flight while all users were active.

    All are active from the last user's first send to the last send of the level.
    """
    if spec.load.sessions:  # how many are in flight is left to think times and answers
        return spec.rate_per_s or float(spec.concurrency or 1), None
    sent_s = sorted(record.sent_s for record in records)
    if spec.rate_per_s is not None:
        due_s = [record.due_s for record in records]
        if len(records) < 2 or sent_s[-1] <= sent_s[0]:
            return spec.rate_per_s, None
        stretch = (max(due_s) - min(due_s)) / (sent_s[-1] - sent_s[0])
        return spec.rate_per_s, spec.rate_per_s * stretch
    users = spec.concurrency or 1
    if len(records) <= users or sent_s[-1] <= sent_s[users - 1]:
        return float(users), None
    start_s, end_s = sent_s[users - 1], sent_s[-1]
    busy_s = sum(max(0.0, min(record.exchange.last_s, end_s) - max(record.sent_s, start_s)) for record in records)
    return float(users), busy_s / (end_s - start_s)


def _receive_facts(ttft: Latencies, signals: ReceiveSignals) -> dict[str, Any]:
    """The fields that state how exact the times are."""
    delays_s = [delay for delay in signals.delays_s if math.isfinite(delay)]
    unsure_share, unsure_first_share = unsure_shares(signals)
    facts: dict[str, Any] = {
        "receive_delay_p99_s": _quantile(delays_s, 0.99),
        "clock_steps": signals.clock_steps,
        "unstamped_share": signals.without_stamp / max(1, len(signals.delays_s)),
        "merged_share": signals.merged / signals.tokens if signals.tokens else 0.0,
        "unsure_share": unsure_share,
        "unsure_first_share": unsure_first_share,
    }
    for name, latencies in (("ttft", ttft), ("itl", gaps(signals))):
        p50, p99 = latencies.quantile(0.50), latencies.quantile(0.99)
        if p50 is not None:
            facts[f"{name}_p50_error_bound_ms"] = s_to_ms(p50.error_s)
        if p99 is not None:
            facts[f"{name}_error_bound_ms"] = s_to_ms(p99.error_s)
            facts[f"{name}_error_bound_frac"] = p99.error_frac
            if name == "itl":
                facts["itl_p99_interval_ms"] = [s_to_ms(p99.low_s), s_to_ms(p99.high_s)]
    return facts


def _ttfts(records: Sequence[RequestRecord], *, virtual: bool) -> Latencies:
    """TTFT of each answer, from its send."""
    answered = [record for record in counted(records) if record.ok and record.token_times_s]
    return ttfts(
        [record.token_times_s[0] - record.sent_s for record in answered],
        [0.0 if virtual else record.exchange.ttft_bound_s for record in answered],
    )


def _plan_too_small(spec: LevelSpec) -> str | None:
    users, planned, noun, verb = spec.concurrency, spec.num_requests, "requests", "send"
    if spec.load.sessions:
        planned, noun, verb = spec.num_sessions, "conversations", "hold"
    if users is None or planned is None or planned >= users:
        return None
    return f"plan: {planned} {noun} cannot keep {users} users busy; {verb} at least {users} a level"


def _late(records: Sequence[RequestRecord], check: GeneratorReport) -> str | None:
    latencies_s = [
        (record.token_times_s or (record.exchange.last_s,))[-1] - record.sent_s
        for record in records
        if record.token_times_s or record.ok
    ]
    median_s = _quantile(latencies_s, 0.5)
    limit_s = max(MIN_DELAY_S, MAX_DELAY_SHARE * median_s)
    delay_s = check.dispatch_delay_p99_s or 0.0
    if delay_s <= limit_s:
        return None
    late = f"requests left {s_to_ms(delay_s):.1f} ms late (p99; median latency "
    late += f"{s_to_ms(median_s):.1f} ms"
    own_s = [max(0.0, r.sent_s - r.due_s - r.exchange.held_s - (r.exchange.connect_s or 0.0)) for r in records]
    if _quantile(own_s, 0.99) <= limit_s:
        return (
            f"server: {late}) because it took so long to accept their connections; "
            "raise its backlog or put less load on it"
        )
    return (
        f"client: {late}, share of a core {check.cpu_share:.2f}); run the generator on an idle "
        "core, give it more --workers, or ask for less load"
    )


def _missed_rate(spec: LevelSpec, records: Sequence[RequestRecord], check: GeneratorReport) -> str | None:
    if spec.rate_per_s is None or check.achieved_load is None:
        return None
    if any(record.exchange.held_s for record in records):
        return None  # a cap held requests back as configured; the checks report it
    if check.achieved_load >= MIN_ACHIEVED_SHARE * spec.rate_per_s:
        return None
    return (
        f"client: {check.achieved_load:.4g} req/s sent of the {spec.rate_per_s:g} asked for (share "
        f"of a core {check.cpu_share:.2f}); lower the rate, or give the generator a faster core or "
        "more --workers"
    )


def _limited(check: GeneratorReport, hidden: int, ttft_doubt: str | None) -> str | None:
    """Whether the times are the generator's rather than the server's.

    hidden      first tokens that a late read hid
    ttft_doubt  a figure of TTFT that may be far off
    """
    unsure_share = check.unsure_first_share or 0.0
    if hidden > MAX_UNSURE_FIRSTS and unsure_share > MAX_UNSURE_FIRST_SHARE:
        what = f"{unsure_share:.1%} of the first tokens were read together with later ones"
    elif ttft_doubt is not None:
        what = f"{ttft_doubt} too long by {check.timestamps} time"
    else:
        return None
    return (
        f"{GENERATOR_LIMITED}: {what} (share of a core {check.cpu_share:.2f}); "
        "lower the load, or give the generator a core of its own or more --workers"
    )


def _ttft_doubt(ttft: Latencies) -> str | None:
    """The figure of TTFT that may be furthest off, if one may be by too much.

    Checked are the mean, the p50 and the highest quantile q that so many answers can support (q **
    answers <= 0.05); and the p99 always, by a wider limit if it is nearly their maximum.
    """
    tail = next((q for q in (0.99, 0.95, 0.9) if q**ttft.values_s.size <= 0.05), 0.5)
    figures = [("mean", ttft.mean(), MAX_BOUND_SHARE)]
    for q in sorted({0.5, tail, 0.99}):
        limit = MAX_BOUND_SHARE if q <= tail else MAX_TAIL_BOUND_SHARE
        figures.append((f"p{100 * q:.0f}", ttft.quantile(q), limit))
    doubts = [
        (bound.error_frac, name, bound.error_s)
        for name, bound, limit in figures
        if bound is not None and bound.error_s > MIN_BOUND_S and bound.error_frac > limit
    ]
    if not doubts:
        return None
    error_frac, name, error_s = max(doubts)
    return f"TTFT {name} may be {s_to_ms(error_s):.1f} ms ({error_frac:.0%})"


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else 0.0
