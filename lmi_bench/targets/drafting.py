"""Speculative decoding: the drafter that the settings choose, facts for the manifest, notes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.adaptive_drafting import DEFAULT_GUESS_COST, AdaptiveDrafter
from lmi_bench.engine.scheduling.drafting import Drafter, ExecutorDrafter, NgramDrafter
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.models.shape import ModelShape

NGRAM_DRAFT: Final = "ngram"
_SAGEMAKER_DRAFT: Final = "sagemaker"


def check_same_vocabulary(folder: Path, draft_folder: Path) -> None:
    """Raise InputError if the draft's token ids differ from the model's."""
    model, draft = Tokenizer.from_folder(folder), Tokenizer.from_folder(draft_folder)
    if not model.same_vocabulary(draft):
        raise InputError(
            f"draft {draft_folder.name} ({draft.vocab_size:,} tokens) has another vocabulary than "
            f"{folder.name} ({model.vocab_size:,} tokens): a draft's token ids must mean the same; "
            "use a smaller model of the same family, or --draft ngram"
        )


def drafter_for(
    settings: EngineSection, shape: ModelShape, draft: ModelShape | None, *, simulated: bool = False
) -> Drafter | None:
    """The drafter; a simulated engine has no text in which to look up n-grams.

    draft  shape of the draft model; the time of a draft step follows from its size
    """
    if settings.draft is None:
        return None
    looks_up = settings.draft == NGRAM_DRAFT and not simulated
    drafter: Drafter = (NgramDrafter if looks_up else ExecutorDrafter)(settings.draft_tokens)
    if not settings.draft_adaptive:
        return drafter
    own_frac = 0.0 if draft is None else draft.params_active / shape.params_active
    return AdaptiveDrafter(drafter, settings.draft_tokens, guess_cost_frac=DEFAULT_GUESS_COST + own_frac)


def speculation_facts(settings: EngineSection) -> dict[str, Any]:
    """Facts for a run's manifest; empty without speculative decoding."""
    if settings.draft is None:
        return {}
    names = ("draft", "draft_tokens", "draft_adaptive", "draft_acceptance")
    facts = {name: getattr(settings, name) for name in names}
    return {"speculation": {name: value for name, value in facts.items() if value is not None}}


def speculation_notes(settings: EngineSection) -> tuple[str, ...]:
    if settings.draft is None:
        return ()
    stated = settings.draft_acceptance
    source = "" if stated is None else f", each accepted with a stated probability of {stated:g}"
    count = settings.draft_tokens
    fewer = ", fewer if few are accepted" if settings.draft_adaptive else ""
    return (f"speculative decoding: up to {count} tokens a step by {settings.draft}{fewer}{source}",)


def refuse_sagemaker_draft(draft: str | None, obstacles: Sequence[str]) -> None:
    """Raise InputError for SageMaker's own draft model; the requested `obstacles` exclude it.

    SageMaker's inference optimization adds the model, but only to an unchanged JumpStart model: not
    with fine-tuned weights, an inference script or inference components, nor on another machine.
    """
    if draft != _SAGEMAKER_DRAFT:
        return
    also = f"; it is not available with {', '.join(obstacles)}" if obstacles else ""
    raise InputError(
        f"--draft {_SAGEMAKER_DRAFT}: SageMaker adds its own draft model by an optimization job "
        f"over an unchanged JumpStart model{also}; use --draft ngram, or name a smaller model "
        "with the same vocabulary"
    )
