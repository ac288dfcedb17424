"""Is a model as sure as it is right? Confidence against accuracy, bin by bin.

expected calibration error = sum over bins of n_bin / n * |accuracy - mean confidence|

Probabilities of tokens are overconfident unless they were calibrated. Source: Guo et al. 2017,
arXiv:1706.04599.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BINS = 5


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """Answers with a confidence in (low, high]: the mean of it, and the share that was right."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float

    @property
    def overconfidence(self) -> float:
        """Confidence less accuracy: above 0 the model is surer than it is right."""
        return self.confidence - self.accuracy


def shares(joint_logprobs: Sequence[float]) -> list[float]:
    """Probability of each choice among the choices alone: softmax of the joint log-probabilities.

    >>> [round(share, 3) for share in shares([math.log(0.3), math.log(0.1)])]
    [0.75, 0.25]
    """
    most = max(joint_logprobs)
    weights = [math.exp(each - most) for each in joint_logprobs]
    return [weight / sum(weights) for weight in weights]


def calibration(
    answers: Sequence[tuple[float, bool]], *, num_bins: int = NUM_BINS
) -> tuple[list[ConfidenceBin], float]:
    """The bins that hold an answer, and the expected calibration error, 0 to 1.

    answers  (confidence from 0 to 1, whether it was right), at least one
    """
    bins = []
    for place in range(num_bins):
        low, high = place / num_bins, (place + 1) / num_bins
        inside = [a for a in answers if low < a[0] <= high or (place == 0 and a[0] == 0)]
        if inside:
            confidence = math.fsum(a[0] for a in inside) / len(inside)
            accuracy = sum(a[1] for a in inside) / len(inside)
            bins.append(ConfidenceBin(low, high, len(inside), confidence, accuracy))
    error = math.fsum(each.count / len(answers) * abs(each.overconfidence) for each in bins)
    return bins, error
