"""What an endpoint costs while it is measured: prices of levels, a limit, and who scaled meanwhile.

An endpoint is paid for by the hour whatever it does, so what a sweep spends is its time times the
price of all instances. Time runs from the first level on, warm-ups and pauses included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmi_bench.analysis.fleet.cost import usd_per_1m_tokens
from lmi_bench.analysis.results.checks import level_name
from lmi_bench.analysis.search.slo_boundary import SloAnswer
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.records import LevelRun
from lmi_bench.core.units import SECONDS_PER_HOUR
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.run.levels import NextLevel
from lmi_bench.report.formats import number

Summarise = Callable[[LevelRun], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Budget:
    """What was said on the command line about money.

    usd_per_hour  of the whole target; instance: a catalog name that gives it
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
        """USD an hour: as given, else of the instance given, else what the target itself says.

        Raises InputError where a limit is set and there is no price to hold it.
        """
        price = self.usd_per_hour if self.usd_per_hour is not None else known_usd_per_hour
        if self.instance is not None:
            price = find_instance(self.instance).price_usd_per_hour
            if price is None:
                raise InputError(
                    f"the catalog has no price of {self.instance}: give --price-per-hour"
                )
        if price is None and self.max_usd is not None:
            raise InputError("--max-spend needs a price: give --price-per-hour or --instance")
        return price


NO_BUDGET = Budget()


class Spend:
    """Follows a sweep's levels: one for each sweep.

    usd_per_hour     of all instances; None: nothing is known and nothing is added to the lines
    count_instances  instances that answer now; None where that cannot be told
    """

    def __init__(
        self,
        usd_per_hour: float | None,
        *,
        max_usd: float | None = None,
        count_instances: Callable[[], int | None] | None = None,
        note: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usd_per_hour = usd_per_hour
        self._max_usd = max_usd
        self._count = count_instances
        self._note = note
        self._clock = clock
        self._started_s: float | None = None
        self._earlier_usd = 0.0
        self._capped = False
        self._level_started_s = 0.0
        self._instances: int | None = None

    def levels(self, rule: NextLevel) -> NextLevel:
        """The same levels, as far as the money goes; none lasts longer than it does."""

        def next_level(finished: Sequence[Mapping[str, Any]]) -> LevelSpec | None:
            now_s = self._clock()
            if self._started_s is None:
                self._started_s = now_s
                self._earlier_usd = float(finished[-1].get("spent_usd") or 0.0) if finished else 0.0
                self._instances = self._count() if self._count is not None else None
            spec = rule(finished)
            self._level_started_s = now_s
            if spec is None or self._max_usd is None or self._usd_per_hour is None:
                return spec
            left_usd = self._max_usd - self._spent_usd(now_s)
            likely_usd = _likely_s(spec, finished) * self._usd_per_hour / SECONDS_PER_HOUR
            if likely_usd >= left_usd:
                self._note(
                    f"stopped before {spec.load.name}: {number(self._max_usd - left_usd, 2)} USD "
                    f"are spent, it would take about {number(likely_usd, 2)} more, and "
                    f"--max-spend is {self._max_usd:g}"
                )
                return None
            left_s = left_usd * SECONDS_PER_HOUR / self._usd_per_hour
            self._capped = left_s < (spec.duration_s or float("inf"))
            return replace(spec, duration_s=min(left_s, spec.duration_s or left_s))

        return next_level

    def summarise(self, summarise: Summarise) -> Summarise:
        """The same line, priced; invalid where instances came or went."""

        def summarise_and_price(run: LevelRun) -> dict[str, Any]:
            line = summarise(run)
            if self._capped and line.get("stopped_by") == "duration":
                self._note(
                    f"{level_name(line)} was cut short: the {self._max_usd:g} USD of --max-spend "
                    f"are used up at {self._usd_per_hour:.2f} USD an hour"
                )
            if self._usd_per_hour is not None:
                now_s = self._clock()
                line |= {
                    "price_usd_per_hour": self._usd_per_hour,
                    "elapsed_s": now_s - self._level_started_s,
                    "spent_usd": self._spent_usd(now_s),
                    "usd_per_1m_output_tokens": self._cost(line, "throughput_tokens_per_s"),
                    "usd_per_1m_total_tokens": self._cost(line, "total_throughput_tokens_per_s"),
                }
            return line | self._instance_change(line)

        return summarise_and_price

    def _cost(self, line: Mapping[str, Any], rate: str) -> float | None:
        return usd_per_1m_tokens(self._usd_per_hour, line[rate])

    def _spent_usd(self, now_s: float) -> float:
        if self._usd_per_hour is None or self._started_s is None:
            return 0.0
        return self._earlier_usd + (now_s - self._started_s) * self._usd_per_hour / SECONDS_PER_HOUR

    def _instance_change(self, line: Mapping[str, Any]) -> dict[str, Any]:
        if self._count is None or (now := self._count()) is None:
            return {}
        before, self._instances = self._instances, now
        if before is None or before == now:
            return {"instances": now}
        if self._usd_per_hour is not None:
            now_s = self._clock()
            self._earlier_usd, self._started_s = self._spent_usd(now_s), now_s
            self._usd_per_hour *= now / before
        reason = (
            f"the endpoint went from {before} to {now} instances during the level: run it again"
        )
        others = [line["invalid_reason"]] if line["invalid_reason"] else []
        return {
            "instances": now,
            "valid": False,
            "invalid_reason": "; ".join([*others, reason]),
        }


def _likely_s(spec: LevelSpec, finished: Sequence[Mapping[str, Any]]) -> float:
    """How long a level will probably take, at the last one's rate of requests; 0.0 at first."""
    last = finished[-1] if finished else {}
    if spec.num_requests is None or not last.get("elapsed_s") or not last.get("requests"):
        return spec.duration_s or 0.0
    likely_s = float(last["elapsed_s"]) * spec.num_requests / float(last["requests"])
    return min(likely_s, spec.duration_s or likely_s)


def cost_at(lines: Sequence[Mapping[str, Any]], answer: SloAnswer) -> str | None:
    """What output costs at the load of an answer, for people; None where nothing is priced."""
    at = [line for line in lines if line.get(answer.load) == answer.value]
    cost = at[-1].get("usd_per_1m_output_tokens") if at else None
    if cost is None:
        return None
    return (
        f"  there {cost:.2f} USD per 1M output tokens, "
        f"{at[-1]['usd_per_1m_total_tokens']:.2f} per 1M in and out, at "
        f"{at[-1]['price_usd_per_hour']:.2f} USD an hour"
    )


def cheapest(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The level at which output costs least, for people; None where nothing is priced."""
    priced = [
        line for line in lines if line.get("usd_per_1m_output_tokens") is not None and line["valid"]
    ]
    if not priced:
        return None
    best = min(priced, key=lambda line: float(line["usd_per_1m_output_tokens"]))
    load = (
        f"concurrency {best['concurrency']}"
        if best["concurrency"] is not None
        else f"{best['rate_per_s']:g} req/s"
    )
    return (
        f"cheapest at {load}: {best['usd_per_1m_output_tokens']:.2f} USD per 1M output tokens, "
        f"{best['usd_per_1m_total_tokens']:.2f} per 1M in and out, at "
        f"{best['price_usd_per_hour']:.2f} USD an hour; the sweep took "
        f"{number(lines[-1]['spent_usd'], 2)} USD"
    )
