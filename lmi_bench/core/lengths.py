"""Lengths of prompts and answers, in tokens, and pauses, in seconds, as distributions.

Grammar: N or fixed(N), uniform(LOW,HIGH), normal(MEAN,STD[,MAX]), lognormal(MEAN,STD[,MAX]),
empirical(N[:WEIGHT],...), and of pauses exponential(MEAN); MEAN and STD are those of the values
themselves. A length is rounded and limited to [1, MAX], so that the longest request is known
beforehand; the default of MAX is four standard deviations above the mean.
"""

import math
import random
import re
from dataclasses import dataclass
from typing import Literal

from lmi_bench.core.errors import InputError

MOST_TOKENS = 10_000_000  # of a request: the longest context
MOST_TIME_S = 1e9  # of a level: 30 years
Kind = Literal["fixed", "uniform", "normal", "lognormal", "empirical"]
_TAIL = 4.0
_PATTERN = re.compile(r"(fixed|uniform|normal|lognormal)\(\s*([0-9.,\s]+)\)")
_ARGUMENTS = {"fixed": (1, 1), "uniform": (2, 2), "normal": (2, 3), "lognormal": (2, 3)}
_EMPIRICAL = re.compile(r"empirical\(\s*([0-9.,:\s]+)\)")
_PAUSES = re.compile(r"(fixed|exponential|uniform|lognormal)\(\s*([0-9.,\s]+)\)")
_PAUSE_ARGUMENTS = {"fixed": 1, "exponential": 1, "uniform": 2, "lognormal": 2}


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of token counts.

    first, second  N and 0; lowest and highest; mean and standard deviation
    most           maximum of a draw
    values, weights  of an empirical distribution: observed lengths and their frequencies
    """

    kind: Kind
    first: float
    second: float
    most: int
    values: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "uniform" and not 1 <= self.first <= self.second:
            raise InputError(f"uniform({self.first:g},{self.second:g}): write 1 <= LOW <= HIGH, in tokens")
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
        if self.kind == "empirical":
            return float(draw.choices(self.values, self.weights)[0])
        return _lognormal(draw, self.first, self.second)


@dataclass(frozen=True, slots=True)
class Pauses:
    """A distribution of seconds; first, second: the value, the mean, the bounds, mean and std."""

    kind: Literal["fixed", "exponential", "uniform", "lognormal"]
    first: float
    second: float = 0.0

    def draw(self, draw: random.Random) -> float:
        """One pause, seconds, at least 0."""
        if self.kind == "fixed" or not self.first + self.second:
            return self.first
        if self.kind == "exponential":
            return draw.expovariate(1 / self.first)
        if self.kind == "uniform":
            return draw.uniform(self.first, self.second)
        return _lognormal(draw, self.first, self.second)


def _lognormal(draw: random.Random, mean: float, deviation: float) -> float:
    """A draw of given mean m and deviation s: the variance of its log is ln(1 + (s / m)^2)."""
    variance = math.log1p((deviation / mean) ** 2)
    return draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def parse_seconds(text: str) -> Pauses:
    """Read a distribution of pauses; raises InputError with the grammar if it cannot be parsed.

    >>> parse_seconds("exponential(2)")
    Pauses(kind='exponential', first=2.0, second=0.0)
    """
    text = text.strip()
    match = _PAUSES.fullmatch(text)
    kind = match[1] if match else "fixed"
    numbers = _numbers(match[2] if match else text)
    wrong = len(numbers) != _PAUSE_ARGUMENTS[kind] or min(numbers, default=-1) < 0
    if (
        wrong
        or (kind == "uniform" and numbers[0] > numbers[1])
        or (kind in ("exponential", "lognormal") and numbers[0] == 0)
    ):
        raise InputError(
            f"seconds {text!r} are not understood; write a number, exponential(MEAN), "
            "uniform(LOW,HIGH) or lognormal(MEAN,STD)"
        )
    return Pauses(kind, *numbers)  # type: ignore[arg-type]


def _numbers(text: str) -> list[float]:
    """Numbers between commas; empty if one of them is none."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    if not max(numbers) <= MOST_TOKENS:
        raise InputError(f"{text[:40]}: lengths and pauses are at most {MOST_TOKENS:,}")
    return numbers


def _empirical(text: str) -> LengthDistribution | None:
    """An empirical distribution; None if it cannot be parsed."""
    match = _EMPIRICAL.fullmatch(text)
    if match is None:
        return None
    try:
        pairs = [part.split(":") for part in match[1].split(",")]
        values = tuple(int(pair[0]) for pair in pairs)
        weights = tuple(float(pair[1]) if len(pair) > 1 else 1.0 for pair in pairs)
    except ValueError:
        return None
    is_wrong = min(values) < 1 or min(weights) <= 0 or max(*values, *weights) > MOST_TOKENS
    if is_wrong or any(len(pair) > 2 for pair in pairs):
        return None
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    return LengthDistribution("empirical", mean, 0.0, max(values), values, weights)


def parse_lengths(text: str) -> LengthDistribution:
    """Read a distribution; raises InputError with the grammar if it cannot be parsed.

    >>> parse_lengths("uniform(500,1000)").mean
    750.0
    """
    text = text.strip()
    found = _empirical(text)
    if found is not None:
        return found
    match = _PATTERN.fullmatch(f"fixed({text})" if text.isdecimal() else text)
    numbers = _numbers(match[2]) if match else []
    least, most = _ARGUMENTS[match[1]] if match else (0, 0)
    if match is None or not least <= len(numbers) <= most:
        raise InputError(
            f"lengths {text!r} are not understood; write fixed(N), uniform(LOW,HIGH), "
            "normal(MEAN,STD[,MAX]), lognormal(MEAN,STD[,MAX]) or empirical(N:WEIGHT,...)"
        )
    first, second = numbers[0], numbers[1] if len(numbers) > 1 else 0.0
    longest = {"fixed": first, "uniform": second}.get(match[1], first + _TAIL * second)
    if len(numbers) == 3:
        longest = numbers[2]
    kind: Kind = match[1]  # type: ignore[assignment]
    return LengthDistribution(kind, first, second, math.ceil(longest))


def parse_adapters(text: str) -> dict[str, float]:
    """Shares of adapters by name from NAME[:SHARE],...; raises InputError for any other text.

    >>> parse_adapters("sql:0.75,chat:0.25")
    {'sql': 0.75, 'chat': 0.25}
    """
    parts = [part.strip().partition(":") for part in text.split(",")]
    try:
        return {name: float(share or 1) for name, _, share in parts}
    except ValueError:
        raise InputError(f"--adapters: {text!r}: write NAME[:SHARE],... such as a:2,b") from None


def parse_mix(text: str) -> list[dict[str, float]]:
    """Kinds of request from IN/OUT[:SHARE],...; raises InputError for any other text.

    >>> parse_mix("20/500,500/20:3")[1]
    {'input_tokens': 500, 'output_tokens': 20, 'share': 3.0}
    """
    kinds: list[dict[str, float]] = []
    for part in text.split(","):
        lengths, _, share = part.partition(":")
        input_text, _, output_text = lengths.partition("/")
        try:
            kind = {"input_tokens": int(input_text), "output_tokens": int(output_text)}
            kinds.append({**kind, "share": float(share or 1)})
        except ValueError:
            raise InputError(f"--mix: {part!r} is not understood; write IN/OUT[:SHARE], such as 20/500:2") from None
    return kinds
