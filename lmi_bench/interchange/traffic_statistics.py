"""Statistics of recorded traffic: lengths, peak rate, burstiness, the day's curve.

Lengths stay joint: long prompts may have short answers, and a plan with independent ones would see
neither the long-long requests nor their absence. Requests are grouped by prompt length, each group
by answer length; a group's kind has the group's mean lengths, so the means are exact.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from lmi_bench.analysis.level.layouts import RequestKind
from lmi_bench.core.traces import TraceRequest

PEAK_WINDOW_S = 300.0
_HOURS = 24
_HOUR_S = 3600.0
_PROMPT_GROUPS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_ANSWER_GROUPS = (0.0, 0.5, 0.9, 1.0)
_FEWEST_GAPS = 200
_FEWEST_IN_A_WINDOW = 20
_COUNT_WINDOW_S = 10.0
_SURE_ERRORS = 3.0  # standard errors from a Poisson process
_LEAST_SHAPE, _MOST_SHAPE = 0.02, 100.0  # equal gaps would need an infinite one


@dataclass(frozen=True, slots=True)
class Burstiness:
    """Shape of gamma arrivals: 1 is Poisson, below 1 bursts; None if it cannot be estimated.

    how  it was estimated, or why not
    """

    shape: float | None
    how: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The workload found in a source; None and empty: not known.

    peak_per_s     highest rate over five minutes; mean_per_s: over the whole record
    hourly_per_s   mean rates of the hours of a day (UTC)
    shared_tokens  common prefix of at least half of the prompts
    repeated       share of prompt text that repeats the beginning of another prompt
    """

    kinds: tuple[RequestKind, ...]
    peak_per_s: float | None = None
    mean_per_s: float | None = None
    bursts: Burstiness | None = None
    hourly_per_s: tuple[float | None, ...] = ()
    shared_tokens: int | None = None
    repeated: float | None = None
    correlation: float | None = None
    assumed: bool = False
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def peak_rate_per_s(times_s: Sequence[float], window_s: float = PEAK_WINDOW_S) -> float:
    """The highest mean rate of any window; the mean rate of a record shorter than the window.

    times_s  rising, shape (n,), at least two of them different

    >>> peak_rate_per_s([0.0, 1.0, 2.0, 1000.0], window_s=10.0)
    0.3
    """
    span_s = times_s[-1] - times_s[0]
    if span_s < window_s:
        return (len(times_s) - 1) / span_s
    times = np.asarray(times_s, dtype=np.float64)
    inside = np.searchsorted(times, times + window_s) - np.arange(len(times))
    return float(inside.max() / window_s)


def burstiness(times_s: Sequence[float]) -> Burstiness:
    """The shape that gamma arrivals need to be as uneven as these.

    The squared variation of the gaps inside each five minutes is 1 / shape; stamps of whole seconds
    hide gaps, so there the variance of counts over their mean is used instead (both converge to the
    same value in a renewal process). Within three standard errors of 1 it is Poisson.
    """
    times = np.asarray(times_s, dtype=np.float64)
    if len(times) <= _FEWEST_GAPS:
        return Burstiness(None, f"{len(times):,} requests are too few to tell bursts from chance")
    whole = bool(np.all(times == np.round(times)))
    ratio, count = _count_dispersion(times) if whole else _gap_variation(times)
    if not count:
        return Burstiness(None, "too few requests in any five minutes to tell bursts from chance")
    how = "counts of ten seconds, since stamps are whole seconds" if whole else "gaps"
    error = math.sqrt((2.0 if whole else 8.0) / count)
    if abs(ratio - 1) <= _SURE_ERRORS * error:
        return Burstiness(1.0, f"{how}: like Poisson within chance")
    shape = min(max(_LEAST_SHAPE, 1 / max(ratio, 1 / _MOST_SHAPE)), _MOST_SHAPE)
    return Burstiness(shape, f"{how}: {ratio:.2f} times Poisson's variance")


def _crowded(times: np.ndarray) -> pd.DataFrame:
    """Seconds since the first request, and its five minutes, of those with enough requests."""
    found = pd.DataFrame({"at_s": times - times[0]})
    found["window"] = found["at_s"] // PEAK_WINDOW_S
    return found[found.groupby("window")["at_s"].transform("size") > _FEWEST_IN_A_WINDOW]


def _gap_variation(times: np.ndarray) -> tuple[float, int]:
    """Mean squared deviation of gaps over their window's mean, and the number of gaps."""
    found = _crowded(times)
    found["gap"] = found.groupby("window")["at_s"].diff()
    means = found.groupby("window")["gap"].transform("mean")
    found = found.assign(squared=(found["gap"] / means - 1) ** 2)[means > 0].dropna()
    free = len(found) - found["window"].nunique()  # a window's mean is taken from its own gaps
    return (float(found["squared"].sum()) / free if free else 1.0), free


def _count_dispersion(times: np.ndarray) -> tuple[float, int]:
    """Variance of the counts of ten seconds over their mean, and the number of them."""
    found, bins = _crowded(times), round(PEAK_WINDOW_S / _COUNT_WINDOW_S)
    found = found[(found["window"] + 1) * PEAK_WINDOW_S <= times[-1] - times[0]]
    tens = found["at_s"] % PEAK_WINDOW_S // _COUNT_WINDOW_S
    counts = pd.crosstab(found["window"], tens).reindex(columns=range(bins), fill_value=0)
    ratios = counts.var(axis=1) / counts.mean(axis=1)
    return (float(ratios.mean()) if len(ratios) else 1.0), len(ratios) * (bins - 1)


def hourly_rates_per_s(times_s: Sequence[float], start_epoch_s: float) -> tuple[float | None, ...]:
    """Mean rate of each hour of the day (UTC), shape (24,); None for an hour not recorded.

    start_epoch_s  Unix time of 0 s
    """
    hours = (start_epoch_s + np.asarray(times_s)) // _HOUR_S
    counts = np.bincount((hours % _HOURS).astype(int), minlength=_HOURS)
    edges = np.arange(hours[0], hours[-1] + 2)
    inside_s = (edges * _HOUR_S).clip(start_epoch_s + times_s[0], start_epoch_s + times_s[-1])
    covered_s = np.bincount((edges[:-1] % _HOURS).astype(int), np.diff(inside_s), _HOURS)
    return tuple(
        count / seconds if seconds >= PEAK_WINDOW_S else None
        for count, seconds in zip(counts.tolist(), covered_s.tolist(), strict=True)
    )


def joint_kinds(requests: Sequence[TraceRequest]) -> tuple[RequestKind, ...]:
    """The requests as at most 18 kinds with their joint shares, which sum to 1."""
    pairs = np.array([(each.input_tokens, each.output_tokens) for each in requests])
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    found: dict[tuple[int, int], float] = {}
    for group in _groups(pairs, _PROMPT_GROUPS):
        for kind in _groups(group[np.argsort(group[:, 1], kind="stable")], _ANSWER_GROUPS):
            tokens_in, tokens_out = (max(1, round(mean)) for mean in kind.mean(axis=0).tolist())
            lengths = tokens_in, tokens_out
            found[lengths] = found.get(lengths, 0.0) + len(kind) / len(pairs)
    return tuple(RequestKind(*lengths, share=share) for lengths, share in found.items())


def _groups(ordered: np.ndarray, ends: Sequence[float]) -> Iterator[np.ndarray]:
    cuts = [round(end * len(ordered)) for end in ends]
    for low, high in pairwise(cuts):
        if high > low:
            yield ordered[low:high]


def independent_kinds(
    prompts: Sequence[tuple[float, float]], answers: Sequence[tuple[float, float]]
) -> tuple[RequestKind, ...]:
    """Kinds of two separate distributions, each of (tokens, share): every pair of lengths."""
    return tuple(
        RequestKind(max(1, round(a)), max(1, round(b)), share_a * share_b)
        for a, share_a in prompts
        for b, share_b in answers
        if share_a * share_b > 0
    )


def length_correlation(requests: Sequence[TraceRequest]) -> float | None:
    """Pearson's correlation of prompt and answer lengths; None where one of them is constant."""
    pairs = np.array([(each.input_tokens, each.output_tokens) for each in requests], dtype=float)
    if len(pairs) < 2 or not pairs.std(axis=0).all():
        return None
    return float(np.corrcoef(pairs.T)[0, 1])


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """How much of the prompts is the same text at their beginning, which a prefix cache can find.

    common    length of the longest beginning that at least half of the prompts have
    repeated  share (0 to 1) of all prompt text that repeats the beginning of another prompt: the
              hit rate of an unlimited cache
    """

    common: int
    repeated: float


def shared_prefix(prompts: Sequence[str]) -> SharedPrefix:
    """The shared beginnings of prompts, with lengths in characters.

    In sorted order a text shares its longest beginning with a neighbour, so the length of all
    texts less the sum over neighbours is the size of their prefix tree.

    >>> shared_prefix(["system a", "system b", "other"])
    SharedPrefix(common=7, repeated=0.3333333333333333)
    """
    ordered = sorted(prompts)
    whole = sum(map(len, ordered))
    if len(ordered) < 2 or not whole:
        return SharedPrefix(0, 0.0)
    half = max(2, -(-len(ordered) // 2))
    common = max(_common(ordered[first], ordered[first + half - 1]) for first in range(len(ordered) - half + 1))
    repeated = sum(_common(before, after) for before, after in pairwise(ordered))
    return SharedPrefix(common, repeated / whole)


def _common(one: str, other: str) -> int:
    """Length of the beginning that both have, by bisection, since texts are long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
