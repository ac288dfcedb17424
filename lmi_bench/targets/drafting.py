"""Speculative decoding as the settings state it: the drafter, facts for the manifest, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.adaptive_drafting import DEFAULT_GUESS_COST, AdaptiveDrafter
from lmi_bench.engine.scheduling.drafting import Drafter, ExecutorDrafter, NgramDrafter
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.models.shape import ModelShape

NGRAM_DRAFT: Final = "ngram"


def check_same_vocabulary(folder: Path, draft_folder: Path) -> None:
    """Refuse a draft whose token ids mean something else than the model's."""
    model, draft = Tokenizer.from_folder(folder), Tokenizer.from_folder(draft_folder)
    if not model.same_vocabulary(draft):
        raise InputError(
            f"draft {draft_folder.name} ({draft.vocab_size:,} tokens) has another vocabulary than "
            f"{folder.name} ({model.vocab_size:,} tokens): a draft's token ids must mean the same; "
            "use a smaller model of the same family, or --draft ngram"
        )


def drafter_for(
    settings: EngineSection,
    shape: ModelShape,
    draft: ModelShape | None,
    *,
    simulated: bool = False,
) -> Drafter | None:
    """What guesses; a simulated engine has no text to look anything up in.

    draft  of a draft model: each of its guesses takes its share of the model's time
    """
    if settings.draft is None:
        return None
    drafter: Drafter
    if settings.draft == NGRAM_DRAFT and not simulated:
        drafter = NgramDrafter(settings.draft_tokens)
    else:
        drafter = ExecutorDrafter(settings.draft_tokens)
    if not settings.draft_adaptive:
        return drafter
    own_frac = 0.0 if draft is None else draft.params_active / shape.params_active
    return AdaptiveDrafter(
        drafter, settings.draft_tokens, guess_cost_frac=DEFAULT_GUESS_COST + own_frac
    )


def speculation_facts(settings: EngineSection) -> dict[str, Any]:
    """What a run's manifest says of it; nothing where it is off."""
    if settings.draft is None:
        return {}
    facts: dict[str, Any] = {
        "draft": settings.draft,
        "draft_tokens": settings.draft_tokens,
        "draft_adaptive": settings.draft_adaptive,
    }
    if settings.draft_acceptance is not None:
        facts["draft_acceptance"] = settings.draft_acceptance
    return {"speculation": facts}


def speculation_notes(settings: EngineSection) -> tuple[str, ...]:
    """Notes for the start of a run."""
    if settings.draft is None:
        return ()
    stated = settings.draft_acceptance
    source = "" if stated is None else f", each holds with a stated chance of {stated:g}"
    count = settings.draft_tokens
    fewer = ", fewer where few hold" if settings.draft_adaptive else ""
    return (
        f"speculative decoding: up to {count} tokens a step by {settings.draft}{fewer}{source}",
    )
