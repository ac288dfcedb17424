"""Early stopping: a level may end once a percentile is known as closely as was asked.

Between which two of n ordered values a quantile lies follows from the binomial distribution alone,
whatever the latencies' own distribution is (MLPerf's LoadGen stops early by the same counts). A
level is looked at ten times at most, after numbers of requests that are fixed beforehand, and each
look has a tenth of the 5 % (Bonferroni). So the interval of the look that ends the level holds the
true quantile in 95 of 100 levels. A look takes the first requests in the order of their sends, once
all of these have ended: the first to end are the fastest.

Requests of one batch depend on each other: n of them know as much as n / (1 + 2 sum of r_k)
independent ones, r_k being the correlation k sends apart of "above the quantile", up to the first
that chance could give. What lasts longer than a level is in no interval of a single level.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.columns import request_ms
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import KnownQuantile
from lmi_bench.core.records import RequestRecord, is_at_start
from lmi_bench.core.slo import METRICS
from lmi_bench.core.workload import LevelSpec

MISS_CHANCE, LOOKS, GROWTH = 0.05, 10, 1.6
LEAST_REQUESTS = 100  # at the first look, to see how they depend on each other
_OF_REQUESTS = tuple(metric for metric in METRICS if metric != "itl")
_RULE = re.compile(rf"({'|'.join(_OF_REQUESTS)})_p(\d+(?:\.\d+)?)\s*:\s*(\d*\.?\d+)\s*%")


@dataclass(frozen=True, slots=True)
class StopWhen:
    """End a level once the interval of a quantile lies within `share` of it, to either side."""

    metric: str
    quantile: float
    share: float

    def __str__(self) -> str:
        return f"{self.metric}_p{self.quantile * 100:g}"

    @property
    def looks(self) -> list[int]:
        """Numbers of requests after which to look; the first are the fewest with an interval."""
        rarest = max(self.quantile, 1 - self.quantile)
        fewest = math.ceil(math.log(MISS_CHANCE / LOOKS / 2) / math.log(rarest))
        return [math.ceil(max(fewest, LEAST_REQUESTS) * GROWTH**look) for look in range(LOOKS)]

    def look(self, values_ms: Sequence[float]) -> KnownQuantile:
        """What as many values as one of `looks` show of the quantile."""
        from scipy.special import bdtr  # 0.2 s to load

        ordered, tail = np.sort(values_ms), MISS_CHANCE / LOOKS / 2
        value_ms = float(np.quantile(ordered, self.quantile))
        independent = _independent(np.asarray(values_ms) > value_ms)
        each = ordered.size / independent
        below = bdtr(np.arange(independent), independent, self.quantile)
        first, last = np.searchsorted(below, (tail, 1 - tail))
        low_ms = float(ordered[max(0, math.floor((first - 1) * each))])
        high_ms = float(ordered[min(ordered.size - 1, math.ceil(last * each))])
        off_ms = max(high_ms - value_ms, value_ms - low_ms)
        within = off_ms / value_ms if value_ms else float(off_ms > 0)
        within = max(within, float(first < 1 or last >= independent))  # 1: nothing bounds a side
        return KnownQuantile(
            metric=str(self),
            asked=self.share,
            within=within,
            low_ms=low_ms,
            high_ms=high_ms,
            requests=ordered.size,
            looks=self.looks.index(ordered.size) + 1,
        )

    def check(self, spec: LevelSpec) -> None:
        """Raise InputError for a level that cannot be looked at."""
        number, least = spec.counted_requests, self.looks[0]
        if spec.load.sessions:
            raise InputError("--stop-when: turns of a conversation depend on each other; leave out")
        if number is not None and number < least:
            raise InputError(
                f"--stop-when {self}: {spec.load.name} counts {number:,} requests, the first look "
                f"needs {least:,}: give --requests-per-level {4 * least} or more, or --duration"
            )


def _independent(above: NDArray[np.bool_]) -> int:
    """How many independent requests know as much as these, in the order of their sends."""
    left = above - above.mean()
    spread, total = float(left @ left), 1.0
    for lag in range(1, left.size // 4):
        alike = float(left[:-lag] @ left[lag:]) / spread if spread else 0.0
        if alike * math.sqrt(left.size) < 1:
            break
        total += 2 * alike
    return max(1, math.floor(above.size / total))


def parse_stop_when(text: str) -> StopWhen:
    """Read a rule; raises InputError with the grammar if it is none.

    >>> parse_stop_when("ttft_p99:5%")
    StopWhen(metric='ttft', quantile=0.99, share=0.05)
    """
    found = _RULE.fullmatch(text.strip())
    if found is None or not 0 < float(found[2]) < 100 or not 0 < float(found[3]) < 100:
        raise InputError(
            f"--stop-when {text!r} is not understood; write METRIC_pNN:X% with a metric of "
            f"{', '.join(_OF_REQUESTS)}, such as ttft_p99:5%"
        )
    return StopWhen(found[1], float(found[2]) / 100, float(found[3]) / 100)


class QuantileWatch:
    """Watches a level's answers until the quantile is known.

    known  what the last look found; None before the first
    """

    def __init__(self, rule: StopWhen, spec: LevelSpec) -> None:
        self.known: KnownQuantile | None = None
        self._rule, self._spec, self._looks = rule, spec, rule.looks
        self._ended: dict[int, float | None] = {}  # beyond the first request that is not over
        self._next, self._values_ms = 0, list[float]()

    def add(self, record: RequestRecord) -> bool:
        """Count a request that ended; True once the quantile is known."""
        value_ms = None
        if record.ok and not is_at_start(record, self._spec):
            open_loop = self._spec.load.is_open
            value_ms = request_ms(record, self._rule.metric, open_loop=open_loop)
        self._ended[record.request_id] = value_ms
        while self._next in self._ended:
            value_ms = self._ended.pop(self._next)
            self._next += 1
            if value_ms is not None and not self._is_known:
                self._values_ms.append(value_ms)
                if len(self._values_ms) in self._looks:
                    self.known = self._rule.look(self._values_ms)
        return self._is_known

    @property
    def _is_known(self) -> bool:
        return self.known is not None and self.known.reached
