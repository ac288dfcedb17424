"""A model's confidence in its answers, and its calibration on questions with known answers.

Scores come from natural log-probabilities of tokens. A model is overconfident unless it was
calibrated; the table shows by how much. Source of the expected calibration error: Guo et al. 2017,
arXiv:1706.04599.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_NUM_BINS: Final = 10


def confidence(logprobs: Sequence[float]) -> float:
    """exp(mean log-probability): the geometric mean of the tokens' probabilities, 0 to 1."""
    return math.exp(math.fsum(logprobs) / len(logprobs))


def text_perplexity(logprobs: Sequence[float]) -> float:
    """exp(-mean log-probability) of a text's tokens."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def shares(joint_logprobs: Sequence[float]) -> list[float]:
    """The probability of each answer if one of them is right: exp(joint), normalised to 1."""
    largest = max(joint_logprobs)
    weights = [math.exp(joint - largest) for joint in joint_logprobs]
    return [weight / math.fsum(weights) for weight in weights]


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """Answers with a confidence above `low_frac`, up to `high_frac`."""

    low_frac: float
    high_frac: float
    count: int
    mean_confidence: float
    right_frac: float


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """Rows by confidence, without empty ones; `right` counts the right answers."""

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
        """Expected calibration error: mean of |confidence - share right| over all answers."""
        return math.fsum(row.count / self.count * abs(row.mean_confidence - row.right_frac) for row in self.rows)


def calibration_table(results: Sequence[tuple[float, bool]]) -> CalibrationTable:
    """Ten rows of equal width from (confidence, whether the answer was right); not empty."""
    values, rights = np.array(results, dtype=np.float64).T
    bins = np.clip(np.ceil(values * _NUM_BINS) - 1, 0, _NUM_BINS - 1)
    rows = tuple(
        CalibrationRow(
            low_frac=number / _NUM_BINS,
            high_frac=(number + 1) / _NUM_BINS,
            count=int(here.sum()),
            mean_confidence=float(values[here].mean()),
            right_frac=float(rights[here].mean()),
        )
        for number in range(_NUM_BINS)
        if (here := bins == number).any()
    )
    return CalibrationTable(rows, len(results), int(rights.sum()), float(values.mean()))
