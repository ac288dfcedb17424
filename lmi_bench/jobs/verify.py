"""One verification: the plan's load as a sweep of one level, and the profile fitted to it."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit import from_run
from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.money import parse_availability
from lmi_bench.analysis.fleet.verification import Verified, compare_figures, contradicts
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, GRAPH_GPU_PRIOR
from lmi_bench.analysis.model.engine_setting import EngineSetting, has_graphs
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, probe_machine
from lmi_bench.analysis.model.profiles import EngineProfile, profile_from_json, profile_to_json
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.analysis.results.slo_results import DECIDED, SloResult, check_slo
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.durable import read_text, write_text
from lmi_bench.core.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_SLO_MISSED, InputError
from lmi_bench.core.level import QUANTILES, Level
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.run_store import Run
from lmi_bench.core.scenario import AUTO, is_endpoint, parse_scenario
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.files import SavedRecommendation, load_recommendation
from lmi_bench.jobs.settings.plan import VerifySettings
from lmi_bench.jobs.sweep.result import SweepResult
from lmi_bench.jobs.sweep.run import SweepOptions, sweep_scenario
from lmi_bench.targets.bench import Access
from lmi_bench.targets.profiles import SHIPPED

_FEWEST_REQUESTS = 300
_LATENCIES = 20
Changes = tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """The plan's figures beside the measured ones; empty if the sweep measured nothing.

    share    of the planned load that the target got
    learned  how the measurement changed the plan's profile, if wanted
    caveats  what was not known when the plan was made; warnings: how the measurement is another
    """

    recommendation: Path
    sweep: SweepResult
    share: float
    figures: tuple[Verified, ...] = ()
    slos: tuple[SloResult, ...] = ()
    learned: "Learned | None" = None
    caveats: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def outside(self) -> list[str]:
        """Names of the figures outside their intervals."""
        return [each.name for each in self.figures if each.verdict == "outside"]

    @property
    def exit_code(self) -> int:
        """99 if a measured SLO is missed, 2 if too few requests tell of one, else 0."""
        verdicts = {slo.verdict for slo in self.slos}
        if "fail" in verdicts:
            return EXIT_SLO_MISSED
        return EXIT_BAD_INPUT if "unsupported" in verdicts else EXIT_DONE

    def to_json(self) -> dict[str, Any]:
        """As `verify --json` writes it."""
        return {
            "schema_version": 1,
            "recommendation": str(self.recommendation),
            "run": str(self.sweep.folder),
            "share": self.share,
            **({"caveats": list(self.caveats)} if self.caveats else {}),
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            "figures": [each.to_json() for each in self.figures],
            "slos": [
                {
                    "slo": str(each.slo),
                    "measured_ms": each.measured_ms,
                    "verdict": each.verdict,
                    "reason": each.reason or None,
                }
                for each in self.slos
            ],
        }


def verify(settings: VerifySettings, listener: Listener = SILENT) -> Verification:
    """Replay the plan's load and compare; raises InputError before anything is written."""
    plan = load_recommendation(settings.recommendation)
    candidate = plan.best
    prices = candidate.usd_per_1m_input_tokens
    if prices is not None and prices.cached_share > 0:
        raise InputError(
            f"the plan finds {prices.cached_share:.0%} of the prompt tokens in a prefix cache, but "
            "verify sends prompts that have nothing in common: sweep the target with the plan's "
            "--turns, --shared-prefix, --documents or --trace, and compare with the plan yourself"
        )
    simulated, copies = settings.target.startswith("sim:"), _serving(candidate) * candidate.copies
    own_share = 1 / copies if simulated else 1.0
    share = own_share if settings.share is None else settings.share
    path, profile = settings.update_profile, None
    if path is not None:
        check_learnable(plan, share * copies)
        profile = known_profile(plan, path)
    folder = settings.out or Path("runs") / f"verify-{settings.recommendation.stem}"
    overrides = _overrides(settings, plan, share, listener)
    if simulated:
        overrides["engine.profile"] = _profile_for(plan, folder)
    options = SweepOptions(access=Access(settings.api_key), stop_at_miss=True)
    scenario = parse_scenario({}).with_overrides(overrides)
    result = sweep_scenario(scenario, options, listener, out=folder)
    if result.interrupted or result.failed or result.run is None or result.pooled is None:
        return Verification(settings.recommendation, result, share, caveats=plan.answer.caveats)
    line = result.pooled.levels[-1]
    warnings = tuple(_warnings(plan, result.run, line))
    figures = tuple(compare_figures(candidate, plan.answer.question, line, share=share))
    slos = tuple(check_slo(line, parse_slo(text)) for text in plan.answer.question.slos)
    learned = None
    if profile is not None and path is not None:
        learned = update(plan, result.run, profile, path, contradicted=contradicts(figures))
    caveats, asked = plan.answer.caveats, settings.recommendation
    return Verification(asked, result, share, figures, slos, learned, caveats, warnings)


def _warnings(plan: SavedRecommendation, run: Run, line: Level) -> Iterator[str]:
    """Why the measurement is not the one that was planned."""
    served = run.manifest.target.model
    with suppress(InputError):  # a name of the server's own
        if served and find_model(served).name != find_model(plan.model).name:
            yield f"the plan is for {plan.model}, but the target says that it serves {served}"
    if line.stopped_by == DECIDED:
        yield (
            f"stopped after {line.sent} requests: an SLO is certain to be missed, "
            "and the figures are of these requests alone"
        )


def _serving(candidate: Candidate) -> int:
    """Machines that the predicted latencies assume: those left after the planned-for failure."""
    availability = parse_availability(candidate.cost.availability)
    return availability.surviving(candidate.instances)


def _overrides(settings: VerifySettings, plan: SavedRecommendation, share: float, listener: Listener) -> dict[str, Any]:
    """The planned load as fields of a scenario: the rate, or the number of users."""
    question, candidate = plan.answer.question, plan.best
    slos, copies = list(question.slos), _serving(candidate) * candidate.copies
    running = candidate.memory.mean_batch_per_copy * copies * share
    requests = settings.requests or max(
        _FEWEST_REQUESTS,
        math.ceil(_LATENCIES * running),  # Little: so many latencies, to be steady for most of it
        *(2 * samples_needed(QUANTILES.get(parse_slo(slo).statistic, 0.5)) for slo in slos),
    )
    lengths: dict[str, Any] = {
        "workload.input_tokens": question.input_tokens,
        "workload.output_tokens": question.output_tokens,
    }
    if question.kinds:
        lengths = {"workload.mix": [kind.to_json() for kind in question.kinds]}
    overrides: dict[str, Any] = {
        "target": settings.target,
        "model": settings.model or (AUTO if is_endpoint(settings.target) else plan.model),
        **lengths,
        "load.requests_per_level": requests,
        "slo": slos,
        "seed": settings.seed,
    }
    rate_per_s = question.rate_per_s
    served = candidate.figures["throughput_tokens_per_s"]
    if rate_per_s is None and question.users is None and slos and served is not None:
        rate_per_s = served.value / question.output_tokens  # planned at its own capacity
    if rate_per_s is not None:
        overrides["load.rate_per_s"] = [rate_per_s * share]
        if question.burstiness < 1:
            overrides |= {"load.arrivals": "gamma", "load.burstiness": question.burstiness}
    else:
        users = max(1, round(running))
        overrides["load.concurrency"] = [users]
        overrides["load.requests_per_level"] = max(requests, 3 * users)
    if settings.target.startswith("sim:"):
        simulated = find_instance(settings.target.removeprefix("sim:")).instance_type
        if simulated != candidate.instance:
            listener.warn(f"the plan is for {candidate.instance}; {simulated} is simulated instead")
        overrides |= _simulated_engine(plan)
    return overrides


def _simulated_engine(plan: SavedRecommendation) -> dict[str, Any]:
    """The planned engine for a simulated target; raises InputError if it cannot be simulated."""
    setting = plan.best.setting
    dtype = setting.dtype or plan.answer.question.dtype
    impossible, speculation = _stated(setting, "kv_dtype", "cuda_graphs"), setting.speculation
    if speculation is not None and speculation.own:
        impossible.append(f"draft {speculation.draft_name}")
    if impossible:
        raise InputError(f"sim: cannot be set to the plan's {', '.join(impossible)}: verify on a real endpoint")
    found = {
        "engine.tensor_parallel": plan.best.tensor_parallel,
        "engine.dtype": dtype,
        "engine.max_rolling_batch_size": setting.max_batch_size,
        "engine.max_rolling_batch_prefill_tokens": setting.max_prefill_tokens,
        "engine.chunked_prefill": setting.chunked_prefill,
        "engine.memory_share": setting.memory_share,
    }
    if speculation is not None:
        found |= {
            "engine.draft": speculation.draft_name,
            "engine.draft_tokens": speculation.draft_tokens,
            "engine.draft_acceptance": speculation.acceptance,
            "engine.draft_adaptive": False,
        }
    return {name: value for name, value in found.items() if value is not None}


def _profile_for(plan: SavedRecommendation, folder: Path) -> str | None:
    """The plan's profile by name, or written beside the run folder; None: the plan has none."""
    if plan.profile_document is None:
        return None
    profile = profile_from_json(json.dumps(plan.profile_document))
    for name, shipped in SHIPPED.items():
        if shipped == profile:
            return name
    path = folder.with_name(f"{folder.name}.profile.json")
    write_text(path, profile_to_json(profile))
    return str(path)


def known_profile(plan: SavedRecommendation, path: Path) -> EngineProfile:
    """The profile to refine: the file's, else the plan's. Raises InputError if there is neither."""
    if path.exists():
        return profile_from_json(read_text(path))
    if plan.profile_document is None:
        raise InputError(f"the plan contains no profile: run recommend --json again, or put a profile at {path}")
    return profile_from_json(json.dumps(plan.profile_document))


def check_learnable(plan: SavedRecommendation, copies: float) -> None:
    """Raises InputError if a profile cannot be fitted to the measurement.

    copies  number of copies whose load the target gets
    """
    if abs(copies - 1) > 1e-6:
        share = 1 / (plan.best.instances * plan.best.copies)
        raise InputError(
            "--update-profile needs the load of one copy, this one is for "
            f"{copies:g}: point --target at one copy and add --share {share:.4g}"
        )
    if plan.answer.question.kinds:
        raise InputError(
            "--update-profile needs equal requests but the plan's differ in "
            "length: sweep with --input-tokens and --output-tokens, then calibrate "
            "on that run"
        )
    if unfitted := _stated(plan.best.setting, "speculation", "cuda_graphs"):
        raise InputError(
            f"--update-profile: the plan's engine differs from its profile in {', '.join(unfitted)}: verify without it"
        )


def _stated(setting: EngineSetting, *names: str) -> list[str]:
    """Which of these the setting states, and how it splits a copy beyond tensor parallelism."""
    stated = [name for name in names if getattr(setting, name) is not None]
    return [*stated, *filter(None, [setting.split])]


def doubted(profile: EngineProfile) -> EngineProfile:
    """The profile after a contradicting measurement: its values, with the uncertainty of an engine
    of its kind without a measured level."""
    general = GRAPH_GPU_PRIOR if has_graphs(profile) else EAGER_GPU_PRIOR
    return replace(
        profile,
        log_sd={name: max(sd, general.log_sd.get(name, sd)) for name, sd in profile.log_sd.items()},
        log_correlation=(),
    )


@dataclass(frozen=True, slots=True)
class Learned:
    """How a measurement changed a profile.

    changes  each figure's prediction over the measurement, less 1: its name, before, after the fit
    doubted  figures lay outside their intervals, so the profile counted as less certain
    refused  why nothing could be fitted; the file is then unchanged
    """

    path: Path
    changes: Changes = ()
    doubted: bool = False
    refused: str | None = None


def update(plan: SavedRecommendation, run: Run, profile: EngineProfile, path: Path, *, contradicted: bool) -> Learned:
    """Fit the profile to the run's level and write it; a run that cannot be fitted changes nothing.

    contradicted  too many figures lie outside, so the profile counts as less certain
    """
    try:
        fitted, changes = _fitted(plan, run, doubted(profile) if contradicted else profile)
    except InputError as exc:
        return Learned(path, doubted=contradicted, refused=str(exc))
    write_text(path, profile_to_json(fitted))
    return Learned(path, changes, contradicted)


def _fitted(plan: SavedRecommendation, run: Run, profile: EngineProfile) -> tuple[EngineProfile, Changes]:
    """The profile fitted to the run's level, and how its predictions of that level change."""
    shape, best = find_model(plan.model), plan.best
    name, setting = best.instance, best.setting
    machine = probe_machine().instance() if name == LOCAL_NAME else find_instance(name)
    placed = from_run.PlacedRun(run, machine, best.tensor_parallel)
    dtype = setting.dtype or plan.answer.question.dtype
    formats = {"dtype": dtype, "kv_dtype": setting.kv_dtype}
    cells = from_run.cells_from_run(placed, shape, **formats)
    fitted, after = from_run.calibrate_on_runs(profile, [placed], shape, **formats)
    fitted = replace(fitted, fitted_on=f"{profile.fitted_on}; then {fitted.fitted_on}")
    before = from_run.accuracy_on(profile, cells)
    changes = (
        (key, pair.predicted / pair.measured - 1, new.figures[key].predicted / pair.measured - 1)
        for old, new in zip(before, after, strict=True)
        for key, pair in old.figures.items()
        if pair.measured
    )
    return fitted, tuple(changes)
