"""How sure a model is of what it says, and how far that can be believed.

Scores come from natural log-probabilities of tokens. A model's own probabilities are overconfident
unless it was calibrated; the table here shows by how much on questions whose answers are known.
Source of the expected calibration error: Guo et al. 2017, arXiv:1706.04599.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_NUM_BINS: Final = 10


def confidence(logprobs: Sequence[float]) -> float:
    """exp(mean log-probability): the geometric mean of the tokens' probabilities, 0 to 1."""
    return math.exp(math.fsum(logprobs) / len(logprobs))


def shares(joint_logprobs: Sequence[float]) -> list[float]:
    """The probability of each answer if it has to be one of them: exp(joint), normalised to 1."""
    largest = max(joint_logprobs)
    weights = [math.exp(joint - largest) for joint in joint_logprobs]
    return [weight / math.fsum(weights) for weight in weights]


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """Answers whose confidence lies above `low_frac`, up to `high_frac`."""

    low_frac: float
    high_frac: float
    count: int
    mean_confidence: float
    right_frac: float


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """Rows by confidence, empty ones left out; right: answers that were."""

    rows: tuple[CalibrationRow, ...]
    count: int
    right: int
    mean_confidence: float

    @property
    def right_frac(self) -> float:
        """Share of the answers that were right."""
        return self.right / self.count

    @property
    def expected_error(self) -> float:
        """Expected calibration error: |mean confidence - share right| of a row, by its count."""
        return math.fsum(
            row.count / self.count * abs(row.mean_confidence - row.right_frac) for row in self.rows
        )


def calibration_table(results: Sequence[tuple[float, bool]]) -> CalibrationTable:
    """Ten rows of equal width from (confidence, whether the answer was right); not empty."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_NUM_BINS)]
    for value, right in results:
        bins[min(_NUM_BINS - 1, max(0, math.ceil(value * _NUM_BINS) - 1))].append((value, right))
    rows = tuple(
        CalibrationRow(
            low_frac=number / _NUM_BINS,
            high_frac=(number + 1) / _NUM_BINS,
            count=len(members),
            mean_confidence=math.fsum(value for value, _ in members) / len(members),
            right_frac=sum(right for _, right in members) / len(members),
        )
        for number, members in enumerate(bins)
        if members
    )
    return CalibrationTable(
        rows,
        count=len(results),
        right=sum(right for _, right in results),
        mean_confidence=math.fsum(value for value, _ in results) / len(results),
    )
