"""One verification: the plan's load as a sweep of one level, then figure by figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.money import parse_availability
from lmi_bench.analysis.fleet.verification import Verified, compare_figures, slo_verdicts
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import AUTO, is_endpoint, parse_scenario
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.saved_recommendation import SavedRecommendation, load_recommendation
from lmi_bench.jobs.settings.verify import VerifySettings
from lmi_bench.jobs.sweep.result import SweepResult
from lmi_bench.jobs.sweep.run import SweepOptions, sweep_scenario
from lmi_bench.jobs.verify_profile import Learned, check_learnable, known_profile, update
from lmi_bench.targets.access import Access

_FEWEST_REQUESTS = 300
_ENGINE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Verification:
    """The plan's figures beside the measured ones; none where the sweep gave no measurement.

    share    of the planned load that the target got
    learned  what the measurement made of the plan's profile, where that was asked for
    """

    recommendation: Path
    sweep: SweepResult
    share: float
    figures: tuple[Verified, ...] = ()
    slos: tuple[dict[str, Any], ...] = ()
    learned: Learned | None = None

    @property
    def outside(self) -> list[str]:
        """Names of the figures outside their intervals."""
        return [each.name for each in self.figures if each.verdict == "outside"]

    @property
    def slo_missed(self) -> bool:
        """Whether a measured SLO is missed."""
        return any(slo["verdict"] == "fail" for slo in self.slos)

    def to_json(self) -> dict[str, Any]:
        """As `verify --json` writes it."""
        return {
            "schema_version": 1,
            "recommendation": str(self.recommendation),
            "run": str(self.sweep.folder),
            "share": self.share,
            "figures": [each.to_json() for each in self.figures],
            "slos": list(self.slos),
        }


def verify(settings: VerifySettings, listener: Listener = SILENT) -> Verification:
    """Replay the plan's load and compare; raises InputError before anything is written."""
    plan = load_recommendation(settings.recommendation)
    candidate = plan.best
    share = _share(settings, candidate)
    path, profile = settings.update_profile, None
    if path is not None:
        copies = _serving(candidate) * candidate.copies
        check_learnable(plan, share * copies)
        profile = known_profile(plan, path)
    folder = settings.out or Path("runs") / f"verify-{settings.recommendation.stem}"
    overrides = _overrides(settings, plan, share, listener)
    result = sweep_scenario(
        parse_scenario({}).with_overrides(overrides),
        SweepOptions(access=Access(settings.api_key)),
        listener,
        out=folder,
    )
    if result.interrupted or result.failed or result.run is None:
        return Verification(settings.recommendation, result, share)
    line = result.levels[-1]
    figures = tuple(compare_figures(candidate, line, share=share))
    slos = tuple(slo_verdicts(plan.answer.question.slos, line))
    learned = None
    if profile is not None and path is not None:
        contradicted = any(each.verdict == "outside" for each in figures)
        learned = update(plan, result.run, profile, path, contradicted=contradicted)
    return Verification(settings.recommendation, result, share, figures, slos, learned)


def _share(settings: VerifySettings, candidate: Candidate) -> float:
    if settings.share is not None:
        if not 0 < settings.share <= 1:
            raise InputError(f"--share must be above 0 and at most 1, got {settings.share:g}")
        return settings.share
    if not settings.target.startswith("sim:"):
        return 1.0
    return 1 / (_serving(candidate) * candidate.copies)


def _serving(candidate: Candidate) -> int:
    """Machines that the predicted latencies are of: those left after the planned-for failure."""
    availability = parse_availability(candidate.cost["availability"])
    return availability.surviving(candidate.instances)


def _overrides(
    settings: VerifySettings, plan: SavedRecommendation, share: float, listener: Listener
) -> dict[str, Any]:
    """The planned load as a scenario: the rate, or as many users as wait at once."""
    question, candidate = plan.answer.question, plan.best
    slos = list(question.slos)
    requests = settings.requests or max(
        _FEWEST_REQUESTS,
        *(2 * samples_needed(QUANTILES.get(parse_slo(slo).statistic, 0.5)) for slo in slos),
        0,
    )
    lengths: dict[str, Any] = {
        "workload.input_tokens": question.input_tokens,
        "workload.output_tokens": question.output_tokens,
    }
    if question.kinds:
        lengths = {"workload.mix": [asdict(kind) for kind in question.kinds]}
    overrides: dict[str, Any] = {
        "target": settings.target,
        "model": settings.model or _model(settings.target, plan),
        **lengths,
        "load.requests_per_level": requests,
        "slo": slos,
        "seed": settings.seed,
    }
    if question.rate_per_s is not None:
        overrides["load.rate_per_s"] = [question.rate_per_s * share]
        if question.burstiness < 1:
            overrides |= {"load.arrivals": "gamma", "load.burstiness": question.burstiness}
    else:
        copies = _serving(candidate) * candidate.copies
        users = max(1, round(candidate.memory["mean_batch_per_copy"] * copies * share))
        overrides["load.concurrency"] = [users]
        overrides["load.requests_per_level"] = max(requests, 3 * users)
    if settings.target.startswith("sim:"):
        simulated = find_instance(settings.target.removeprefix("sim:")).instance_type
        if simulated != candidate.instance:
            listener.warn(f"the plan is for {candidate.instance}; {simulated} is simulated instead")
        overrides |= _simulated_engine(plan)
    return overrides


def _model(target: str, plan: SavedRecommendation) -> str:
    """The plan's model where it is to be simulated; a server is asked what it calls its own."""
    if is_endpoint(target):
        return AUTO
    return plan.model


def _simulated_engine(plan: SavedRecommendation) -> dict[str, Any]:
    """The planned engine as a simulated target takes it; raises InputError where it cannot."""
    setting = plan.best.setting
    dtype = setting.dtype or plan.answer.question.dtype
    unset = ("kv_dtype", "cuda_graphs")
    impossible = [name for name in unset if getattr(setting, name) is not None]
    if dtype not in _ENGINE_DTYPES:
        impossible.append(f"dtype {dtype}")
    if impossible:
        raise InputError(
            f"sim: cannot be set to the plan's {', '.join(impossible)}: verify on a real endpoint"
        )
    found = {
        "engine.tensor_parallel": plan.best.tensor_parallel,
        "engine.dtype": dtype,
        "engine.max_rolling_batch_size": setting.max_batch_size,
        "engine.max_rolling_batch_prefill_tokens": setting.max_prefill_tokens,
        "engine.chunked_prefill": setting.chunked_prefill,
        "engine.memory_share": setting.memory_share,
    }
    spoken = setting.speculation
    if spoken is not None:
        found |= {
            "engine.draft": "ngram" if spoken.draft is None else spoken.draft.name,
            "engine.draft_tokens": spoken.draft_tokens,
            "engine.draft_acceptance": spoken.acceptance,
            "engine.draft_adaptive": False,
        }
    return {name: value for name, value in found.items() if value is not None}
