"""80 % intervals of a simulated run's levels, from the profile that predicted its step times."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lmi_bench.analysis.fit.from_run import cell_of_summary, profile_for_run, run_model
from lmi_bench.analysis.fit.uncertainty import Uncertainty
from lmi_bench.analysis.model.builtin_profiles import shipped_profile
from lmi_bench.analysis.model.measured_level import LENGTH_SPREAD
from lmi_bench.analysis.model.profiles import EngineProfile, profile_from_json
from lmi_bench.analysis.model.setup import Setup, Speculation
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.level import Level
from lmi_bench.core.run_store import Run


def level_uncertainties(run: Run, lines: Sequence[Level]) -> list[Uncertainty | None]:
    """The uncertainty of each level; None where it is not known, as in a measured run."""
    unknown: list[Uncertainty | None] = [None] * len(lines)
    setup, profile = setup_of_run(run), _profile_of(run)
    if not run.manifest.target.is_simulated or setup is None or profile is None:
        return unknown
    profile = profile_for_run(profile, run)
    workload = run.manifest.scenario.workload
    is_drawn = not (workload.input_tokens and workload.output_tokens)
    found = []
    for line in lines:
        each: Uncertainty | None = None
        with suppress(LmiBenchError):
            cell = replace(
                cell_of_summary(run.path, line, setup),
                replicas=run.manifest.target.replicas,
                length_spread=LENGTH_SPREAD if is_drawn else 0.0,
            )
            each = Uncertainty.of(profile, cell, spread=is_drawn)
        found.append(each)
    return found


def setup_of_run(run: Run) -> Setup | None:
    """The model on the devices of one replica, as the manifest states it; None if it does not."""
    facts, engine = run.manifest.target, run.manifest.scenario.engine
    if not (facts.instance and facts.dtype and facts.tensor_parallel):
        return None
    try:
        speculation = None
        if engine.draft is not None:
            draft = None if engine.draft == "ngram" else find_model(engine.draft)
            stated = engine.to_json().get("draft_acceptance") or 0.0
            speculation = Speculation(engine.draft_tokens, stated, draft)
        return Setup(
            find_model(run_model(run)),
            find_instance(facts.instance),
            facts.tensor_parallel,
            facts.dtype,
            kv_dtype=facts.kv_dtype,
            speculation=speculation,
        ).beside(facts.replicas)
    except LmiBenchError:
        return None


def _profile_of(run: Run) -> EngineProfile | None:
    """The run's profile: one that ships, or the file that the scenario names if it is the same."""
    wanted = run.manifest.target.profile_provenance
    found = shipped_profile(wanted or "")
    named: Mapping[str, object] = run.manifest.scenario.engine.to_json()
    if found is None and named.get("profile"):
        with suppress(LmiBenchError, OSError, UnicodeDecodeError):
            found = profile_from_json(Path(str(named["profile"])).read_text(encoding="utf-8"))
    return found if found is not None and found.provenance == wanted else None
