"""Lengths of prompts and answers, in tokens, as distributions.

Grammar: fixed(N), uniform(LOW,HIGH), normal(MEAN,STD[,MAX]), lognormal(MEAN,STD[,MAX]); MEAN and
STD are those of the lengths themselves. A draw is rounded and held within [1, MAX], MAX being four
standard deviations above the mean unless given, so what a server must hold is known beforehand.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Literal

from lmi_bench.errors import InputError

Kind = Literal["fixed", "uniform", "normal", "lognormal"]
_TAIL = 4.0
_PATTERN = re.compile(r"(fixed|uniform|normal|lognormal)\(\s*([0-9.,\s]+)\)")
_ARGUMENTS = {"fixed": (1, 1), "uniform": (2, 2), "normal": (2, 3), "lognormal": (2, 3)}


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of token counts.

    first, second  N and 0; lowest and highest; mean and standard deviation
    most           no draw is longer
    """

    kind: Kind
    first: float
    second: float
    most: int

    def __post_init__(self) -> None:
        if self.kind == "uniform" and not 1 <= self.first <= self.second:
            raise InputError(
                f"uniform({self.first:g},{self.second:g}): write 1 <= LOW <= HIGH, in tokens"
            )
        if self.first < 1 or self.second < 0 or self.most < 1:
            raise InputError(
                f"{self.kind}({self.first:g},{self.second:g}): lengths are at least 1 token, and "
                "a standard deviation at least 0"
            )

    @property
    def mean(self) -> float:
        """Mean length before the bounds, in tokens."""
        return (self.first + self.second) / 2 if self.kind == "uniform" else self.first

    def draw(self, draw: random.Random) -> int:
        """One length, in [1, most]."""
        return min(self.most, max(1, round(self._value(draw))))

    def _value(self, draw: random.Random) -> float:
        if self.kind == "fixed":
            return self.first
        if self.kind == "uniform":
            return float(draw.randint(round(self.first), round(self.second)))
        if self.kind == "normal":
            return draw.gauss(self.first, self.second)
        # of a lognormal with mean m and deviation s: variance of the log is ln(1 + (s / m)^2)
        variance = math.log1p((self.second / self.first) ** 2)
        return draw.lognormvariate(math.log(self.first) - variance / 2, math.sqrt(variance))


def parse_lengths(text: str) -> LengthDistribution:
    """Read a distribution; raises InputError with the grammar if it is none.

    >>> parse_lengths("uniform(500,1000)")
    LengthDistribution(kind='uniform', first=500.0, second=1000.0, most=1000)
    """
    match = _PATTERN.fullmatch(text.strip())
    try:
        numbers = [float(part) for part in match[2].split(",")] if match else []
    except ValueError:
        numbers = []
    least, most = _ARGUMENTS[match[1]] if match else (0, 0)
    if match is None or not least <= len(numbers) <= most:
        raise InputError(
            f"lengths {text!r} are not understood; write fixed(N), uniform(LOW,HIGH), "
            "normal(MEAN,STD[,MAX]) or lognormal(MEAN,STD[,MAX]), in tokens"
        )
    first, second = numbers[0], numbers[1] if len(numbers) > 1 else 0.0
    longest = {"fixed": first, "uniform": second}.get(match[1], first + _TAIL * second)
    if len(numbers) == 3:
        longest = numbers[2]
    kind: Kind = match[1]  # type: ignore[assignment]
    return LengthDistribution(kind, first, second, math.ceil(longest))
