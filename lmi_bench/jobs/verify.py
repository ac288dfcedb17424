"""One verification: the plan's load as a sweep of one level, then figure by figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.availability import parse_availability
from lmi_bench.analysis.fleet.verification import Verified, compare_figures, slo_verdicts
from lmi_bench.analysis.results.latency import samples_needed
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import AUTO, is_endpoint, parse_scenario
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.saved_recommendation import load_recommendation
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
    candidate = plan["recommended"]
    share = _share(settings, candidate)
    path, profile = settings.update_profile, None
    if path is not None:
        copies = _serving(candidate) * int(candidate["replicas"])
        check_learnable(plan, candidate, share * copies)
        profile = known_profile(plan, path)
    folder = settings.out or Path("runs") / f"verify-{settings.recommendation.stem}"
    overrides = _overrides(settings, plan, candidate, share, listener)
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
    slos = tuple(slo_verdicts(list(plan.get("slos") or ()), line))
    learned = None
    if profile is not None and path is not None:
        contradicted = any(each.verdict == "outside" for each in figures)
        learned = update(plan, candidate, result.run, profile, path, contradicted=contradicted)
    return Verification(settings.recommendation, result, share, figures, slos, learned)


def _share(settings: VerifySettings, candidate: Mapping[str, Any]) -> float:
    if settings.share is not None:
        if not 0 < settings.share <= 1:
            raise InputError(f"--share must be above 0 and at most 1, got {settings.share:g}")
        return settings.share
    if not settings.target.startswith("sim:"):
        return 1.0
    return 1 / (_serving(candidate) * int(candidate["replicas"]))


def _serving(candidate: Mapping[str, Any]) -> int:
    """Machines that the predicted latencies are of: those left after the planned-for failure."""
    availability = parse_availability(candidate["cost"]["availability"])
    return availability.surviving(int(candidate["instances"]))


def _overrides(
    settings: VerifySettings,
    plan: Mapping[str, Any],
    candidate: Mapping[str, Any],
    share: float,
    listener: Listener,
) -> dict[str, Any]:
    """The planned load as a scenario: the rate, or as many users as wait at once."""
    slos = list(plan.get("slos") or ())
    requests = settings.requests or max(
        _FEWEST_REQUESTS,
        *(2 * samples_needed(QUANTILES.get(parse_slo(slo).statistic, 0.5)) for slo in slos),
        0,
    )
    lengths: dict[str, Any] = {
        "workload.input_tokens": plan["input_tokens"],
        "workload.output_tokens": plan["output_tokens"],
    }
    if plan.get("kinds"):
        lengths = {"workload.mix": plan["kinds"]}
    overrides: dict[str, Any] = {
        "target": settings.target,
        "model": settings.model or _model(settings.target, plan),
        **lengths,
        "load.requests_per_level": requests,
        "slo": slos,
        "seed": settings.seed,
    }
    if plan.get("rate_per_s") is not None:
        overrides["load.rate_per_s"] = [plan["rate_per_s"] * share]
        if plan.get("burstiness", 1) < 1:
            overrides |= {"load.arrivals": "gamma", "load.burstiness": plan["burstiness"]}
    else:
        copies = _serving(candidate) * candidate["replicas"]
        users = max(1, round(candidate["memory"]["mean_batch_per_copy"] * copies * share))
        overrides["load.concurrency"] = [users]
        overrides["load.requests_per_level"] = max(requests, 3 * users)
    if settings.target.startswith("sim:"):
        simulated = find_instance(settings.target.removeprefix("sim:")).instance_type
        if simulated != candidate["instance"]:
            listener.warn(
                f"the plan is for {candidate['instance']}; {simulated} is simulated instead"
            )
        overrides |= _simulated_engine(plan, candidate)
    return overrides


def _model(target: str, plan: Mapping[str, Any]) -> str:
    """The plan's model where it is to be simulated; a server is asked what it calls its own."""
    if is_endpoint(target):
        return AUTO
    return str(plan.get("model_as_named") or plan["model"])


def _simulated_engine(plan: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, Any]:
    """The planned engine as a simulated target takes it; raises InputError where it cannot."""
    setting = candidate.get("setting") or {}
    dtype = setting.get("dtype") or plan.get("dtype")
    impossible = [name for name in ("kv_dtype", "cuda_graphs") if setting.get(name) is not None]
    if dtype not in (None, *_ENGINE_DTYPES):
        impossible.append(f"dtype {dtype}")
    if impossible:
        raise InputError(
            f"sim: cannot be set to the plan's {', '.join(impossible)}: verify on a real endpoint"
        )
    found = {
        "engine.tensor_parallel": candidate["tensor_parallel"],
        "engine.dtype": dtype,
        "engine.max_rolling_batch_size": setting.get("max_batch_size"),
        "engine.max_rolling_batch_prefill_tokens": setting.get("max_prefill_tokens"),
        "engine.chunked_prefill": setting.get("chunked_prefill"),
        "engine.memory_share": setting.get("memory_share"),
    }
    spoken = setting.get("speculation")
    if spoken is not None:
        found |= {
            "engine.draft": spoken["draft"] or "ngram",
            "engine.draft_tokens": spoken["draft_tokens"],
            "engine.draft_acceptance": spoken["draft_acceptance"],
            "engine.draft_adaptive": False,
        }
    return {name: value for name, value in found.items() if value is not None}
