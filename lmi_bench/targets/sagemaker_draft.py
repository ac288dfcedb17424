"""SageMaker's own draft model: where it cannot be had, which is everywhere but in its own jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lmi_bench.core.errors import InputError

SAGEMAKER_DRAFT: Final = "sagemaker"


def refuse_sagemaker_draft(draft: str | None, obstacles: Sequence[str]) -> None:
    """Raise InputError if that draft was asked for.

    obstacles  what stands against it in what was asked for

    SageMaker's inference optimization adds the model by itself, to a model of JumpStart that
    nobody changed: not with fine-tuned weights, an inference script or inference components, nor
    in a test on one's own machine.
    """
    if draft != SAGEMAKER_DRAFT:
        return
    also = f"; it cannot be had with {', '.join(obstacles)}" if obstacles else ""
    raise InputError(
        f"--draft {SAGEMAKER_DRAFT}: SageMaker adds its own draft model by an optimization job "
        f"over an unchanged JumpStart model{also}; use --draft ngram, or name a smaller model "
        "with the same vocabulary"
    )
