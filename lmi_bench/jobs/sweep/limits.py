"""How long a sweep may take and what it may cost: levels that would exceed either are left out.

Levels that a rule picks (`--concurrency auto`) have no foreseeable end, so they have five minutes
on a real clock unless `--max-time` states another limit. A level is judged before it begins, by the
levels before it; one that has begun runs to its end, or until the money is used up.

A sweep's cost is its hours times the price of all instances, from the first level on, with warm-ups
and pauses.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.analysis.results.slo_results import FAILURE_RULES, FailureRule
from lmi_bench.analysis.search.next_level import Fits
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.clock import loop_time_s
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import Level, NextLevel
from lmi_bench.core.records import LevelRun
from lmi_bench.core.units import SECONDS_PER_HOUR
from lmi_bench.core.workload import USUAL_REQUESTS_PER_USER, LevelSpec
from lmi_bench.loadgen.run.sweep import Summarise
from lmi_bench.report.formats import number

AUTO_S = 300.0  # maximum time of levels that a rule picks, on a real clock
_LEVEL_SHARE = 1 / 12  # of that time, for the sends of one level
_MARGIN = 1.5  # on the expected time of three requests per user
_MINUTE_S = 60.0


@dataclass(slots=True, eq=False)
class TimeBox:
    """Follows one sweep's time, from the first call on.

    max_s  None: no limit
    note   called once, for the first level that is left out
    """

    max_s: float | None
    note: Callable[[str], None] = field(default=lambda _: None, kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    _start_s: float | None = field(default=None, init=False)
    _noted: bool = field(default=False, init=False)

    def left_s(self) -> float | None:
        """Seconds that are left, at least 0; None without a limit."""
        if self.max_s is None:
            return None
        if self._start_s is None:
            self._start_s = self.clock()
        return max(0.0, self.max_s - (self.clock() - self._start_s))

    def fits(self, spec: LevelSpec, finished: Sequence[Level]) -> bool:
        """Whether a level will probably end in time; always true for the first one."""
        left_s = self.left_s()
        if left_s is None or not finished:
            return True
        likely_s = likely_level_s(self.shortened(spec, finished), finished)
        if likely_s <= left_s:
            return True
        if not self._noted:
            self._noted = True
            likely, left, most = map(clock_text, (likely_s, left_s, self.max_s or 0.0))
            self.note(
                f"left out {spec.load.name}: it would take about {likely}, and {left} "
                f"of {most} are left; --resume with a longer --max-time goes on"
            )
        return False

    def shortened(self, spec: LevelSpec, finished: Sequence[Level]) -> LevelSpec:
        """The level with a share of all time for its sends, and time for three rounds of them.

        The 32 requests of one user would use up the time of a slow server.
        """
        users, number = spec.concurrency, spec.num_requests
        if self.max_s is None or not users or not number or spec.duration_s or spec.load.sessions:
            return spec
        usual = USUAL_REQUESTS_PER_USER * users + spec.start_requests
        rounds = replace(spec, num_requests=min(number, usual))
        least_s = likely_level_s(rounds, finished)
        return replace(spec, duration_s=max(self.max_s * _LEVEL_SHARE, _MARGIN * least_s))


def up_to(rule: NextLevel, fits: Fits) -> NextLevel:
    """The rule's levels, up to the first that does not fit."""

    def next_level(finished: Sequence[Level]) -> LevelSpec | None:
        spec = rule(finished)
        return spec if spec is None or fits(spec, finished) else None

    return next_level


def likely_level_s(spec: LevelSpec, finished: Sequence[Level]) -> float:
    """Probable time of a level, from the levels of lower load; 0.0 if unknown.

    A closed loop's requests end at the rate of the next lower level, times the gain of the last
    step up (1 to 2); after a single level, answers are expected to take as long as there.
    Levels with a price state their time with the warm-up, others without.
    """
    if spec.num_requests is None or spec.concurrency is None:
        if spec.duration_s or spec.num_requests is None or spec.rate_per_s is None:
            return spec.duration_s or 0.0
        return spec.num_requests / spec.rate_per_s
    rates: dict[int, float] = {}
    for line in finished:
        users, took_s = line.load.concurrency, line.elapsed_s or line.wall_s
        if users and took_s and users <= spec.concurrency:
            rates[users] = line.sent / took_s
    if not rates:
        return spec.duration_s or 0.0
    below, *lower = sorted(rates, reverse=True)
    gain = 1.0 if lower else spec.concurrency / below
    if lower and below < spec.concurrency:
        gain = min(2.0, max(1.0, rates[below] / rates[lower[0]]))
    likely_s = spec.num_requests / (rates[below] * gain)
    return min(likely_s, spec.duration_s or likely_s)


def read_max_time(text: str) -> float | None:
    """Seconds of `90`, `90s`, `10m` or `1h`, None of `none`; raises InputError for another text.

    >>> read_max_time("10m")
    600.0
    """
    if text == "none":
        return None
    units = {"s": 1.0, "m": _MINUTE_S, "h": 60 * _MINUTE_S}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"--max-time: {text!r} is no time; write 90, 90s, 10m, 1h or none")
    return seconds


def clock_text(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock_text(312.4)
    '5:12'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


@dataclass(frozen=True, slots=True)
class Budget:
    """The price of the target and the maximum cost of a sweep.

    usd_per_hour  of the whole target; instance: the catalog name to take it from
    max_usd       the sweep stops before it has spent more
    """

    usd_per_hour: float | None = None
    instance: str | None = None
    max_usd: float | None = None

    def __post_init__(self) -> None:
        if self.usd_per_hour is not None and self.instance is not None:
            raise InputError("--price-per-hour and --instance both give a price: leave one out")
        for flag, value in (("--price-per-hour", self.usd_per_hour), ("--max-spend", self.max_usd)):
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{flag} must be above 0 USD, got {value:g}")

    def price(self, known_usd_per_hour: float | None) -> float | None:
        """USD an hour: as given, else that of the given instance, else the target's own.

        Raises InputError for a limit without a price.
        """
        price = self.usd_per_hour if self.usd_per_hour is not None else known_usd_per_hour
        if self.instance is not None:
            price = find_instance(self.instance).price_usd_per_hour
            if price is None:
                raise InputError(f"the catalog has no price of {self.instance}: give --price-per-hour")
        if price is None and self.max_usd is not None:
            raise InputError("--max-spend needs a price: give --price-per-hour or --instance")
        return price


@dataclass(slots=True, eq=False)
class Spend:
    """Follows one sweep's cost, level by level.

    usd_per_hour     of all instances; None: unknown, and levels get no price
    count_instances  number of instances that answer now; None if unknown
    """

    usd_per_hour: float | None
    max_usd: float | None = field(default=None, kw_only=True)
    count_instances: Callable[[], int | None] = field(default=lambda: None, kw_only=True)
    note: Callable[[str], None] = field(default=lambda _: None, kw_only=True)
    clock: Callable[[], float] = field(default=loop_time_s, kw_only=True)
    _started_s: float | None = field(default=None, init=False)
    _earlier_usd: float = field(default=0.0, init=False)
    _capped: bool = field(default=False, init=False)
    _level_started_s: float = field(default=0.0, init=False)
    _instances: int | None = field(default=None, init=False)

    def levels(self, rule: NextLevel) -> NextLevel:
        """The rule's levels while money is left, each at most as long as the money lasts."""

        def next_level(finished: Sequence[Level]) -> LevelSpec | None:
            now_s = self.clock()
            if self._started_s is None:
                self._started_s = now_s
                self._earlier_usd = (finished[-1].spent_usd or 0.0) if finished else 0.0
                self._instances = self.count_instances()
            spec = rule(finished)
            self._level_started_s = now_s
            if spec is None or self.max_usd is None or self.usd_per_hour is None:
                return spec
            left_usd = self.max_usd - self._spent_usd(now_s)
            likely_usd = likely_level_s(spec, finished) * self.usd_per_hour / SECONDS_PER_HOUR
            if likely_usd >= left_usd:
                spent, more = (number(usd, 2) for usd in (self.max_usd - left_usd, likely_usd))
                self.note(
                    f"stopped before {spec.load.name}: {spent} USD are spent, it would take "
                    f"about {more} more, and --max-spend is {self.max_usd:g}"
                )
                return None
            left_s = left_usd * SECONDS_PER_HOUR / self.usd_per_hour
            self._capped = left_s < (spec.duration_s or float("inf"))
            return replace(spec, duration_s=min(left_s, spec.duration_s or left_s))

        return next_level

    def summarise(self, summarise: Summarise) -> Summarise:
        """The level with its price; invalid if the number of instances changed."""

        def summarise_and_price(run: LevelRun) -> Level:
            line = summarise(run)
            if self._capped and line.stopped_by == "duration":
                self.note(
                    f"{line.name} was cut short: the {self.max_usd:g} USD of --max-spend "
                    f"are used up at {self.usd_per_hour:.2f} USD an hour"
                )
            if self.usd_per_hour is not None:
                now_s = self.clock()
                price = self.usd_per_hour
                line = replace(
                    line,
                    price_usd_per_hour=price,
                    elapsed_s=now_s - self._level_started_s,
                    spent_usd=self._spent_usd(now_s),
                    usd_per_1m_output_tokens=usd_per_1m_tokens(price, line.throughput_tokens_per_s),
                    usd_per_1m_total_tokens=usd_per_1m_tokens(price, line.total_throughput_tokens_per_s),
                )
            return self._with_instances(line)

        return summarise_and_price

    def _spent_usd(self, now_s: float) -> float:
        if self.usd_per_hour is None or self._started_s is None:
            return 0.0
        return self._earlier_usd + (now_s - self._started_s) * self.usd_per_hour / SECONDS_PER_HOUR

    def _with_instances(self, line: Level) -> Level:
        """The level with its number of instances; invalid if that changed during the level."""
        if (now := self.count_instances()) is None:
            return line
        before, self._instances = self._instances, now
        if before is None or before == now:
            return replace(line, instances=now)
        if self.usd_per_hour is not None:
            now_s = self.clock()
            self._earlier_usd, self._started_s = self._spent_usd(now_s), now_s
            self.usd_per_hour *= now / before
        reason = f"the endpoint went from {before} to {now} instances during the level: run it again"
        invalid_reason = "; ".join(filter(None, (line.invalid_reason, reason)))
        return replace(line, instances=now, valid=False, invalid_reason=invalid_reason)


def read_failures(text: str) -> FailureRule:
    """The rule for failed requests; raises InputError for another word."""
    if text not in FAILURE_RULES:
        raise InputError(f"--failures {text!r} is not understood; write exclude or infinite")
    return text


def read_share(flag: str, text: str) -> float:
    """A share from `5%` or `0.05`; raises InputError for what is no share."""
    try:
        value = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InputError(f"{flag} {text!r} is not a share; write for example 5% or 0.05")
    return value
