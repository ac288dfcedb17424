"""Planning settings as the planner takes them: prices, purchase, limits, drafts, engine settings.

Every function raises InputError that names the option which cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from lmi_bench.analysis.model.speculation import Speculation, acceptance_of_counts
from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.prices import Platform, load_price_list, reprice
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run
from lmi_bench.jobs.settings.planning import DraftSettings, PriceSettings
from lmi_bench.targets.drafting import NGRAM_DRAFT

_DRAFT_TOKENS = 4


def repriced(instances: Iterable[Instance], settings: PriceSettings) -> tuple[Instance, ...]:
    """The machines with the prices that count: the user's list before the platform's."""
    price_list = None if settings.prices is None else load_price_list(settings.prices)
    platform = cast("Platform", settings.platform)
    return reprice(instances, platform=platform, price_list=price_list)


def planned_speculation(settings: DraftSettings) -> Speculation | None:
    """Which model guesses and how often a guess holds; None where no draft is named."""
    draft, draft_tokens = settings.draft, settings.draft_tokens
    acceptance = settings.draft_acceptance
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
        done: Any = line.engine or {}
        drafted += int(done.get("drafted_tokens") or 0)
        accepted += int(done.get("accepted_tokens") or 0)
    count = int(settings["draft_tokens"])
    return acceptance_of_counts(drafted, accepted, count), count
