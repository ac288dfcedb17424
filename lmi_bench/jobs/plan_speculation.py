"""Speculation of a plan as the flags state it: who guesses, and how often the guesses hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_bench.analysis.model.speculation import Speculation, acceptance_of_counts
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run
from lmi_bench.targets.drafting import NGRAM_DRAFT

_DRAFT_TOKENS = 4


def planned_speculation(
    draft: str | None, draft_tokens: int | None, acceptance: str | None
) -> Speculation | None:
    """None where no draft is named.

    draft_tokens  None: 4, as the engine's own; acceptance: a number, or a run that measured it

    Raises InputError where a flag lacks another or the acceptance cannot be told.
    """
    if draft is None:
        if draft_tokens is not None or acceptance is not None:
            raise InputError(
                "--draft-tokens and --draft-acceptance are of speculative decoding: add --draft "
                "ngram or --draft MODEL"
            )
        return None
    if acceptance is None:
        raise InputError(
            f"--draft {draft}: add --draft-acceptance, the chance (0 to 1) that a guess holds, or "
            "a run of the bundled engine with that draft, which measured it"
        )
    smaller = None if draft == NGRAM_DRAFT else find_model(draft)
    if Path(acceptance).is_dir():
        counted, run_tokens = _measured(Path(acceptance))
        return Speculation(draft_tokens or run_tokens, counted, smaller)
    try:
        chance = float(acceptance)
    except ValueError:
        raise InputError(
            f"--draft-acceptance {acceptance}: neither a number from 0 to 1 nor a run folder"
        ) from None
    return Speculation(draft_tokens or _DRAFT_TOKENS, chance, smaller)


def _measured(folder: Path) -> tuple[float, int]:
    """The chance that a guess held in a run, and how many it made a step."""
    run = load_run(folder)
    facts = run.manifest.get("target")
    settings = facts.get("speculation") if isinstance(facts, Mapping) else None
    if not isinstance(settings, Mapping):
        raise InputError(
            f"--draft-acceptance {folder}: the run did not speculate (sweep with --draft)"
        )
    drafted = accepted = 0
    for line in run.levels:
        done: Any = line.get("engine") or {}
        drafted += int(done.get("drafted_tokens") or 0)
        accepted += int(done.get("accepted_tokens") or 0)
    count = int(settings["draft_tokens"])
    return acceptance_of_counts(drafted, accepted, count), count
