"""One verification: the plan's load as a sweep of one level, then figure by figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.availability import parse_availability
from lmi_bench.analysis.fleet.verification import Verified, compare_figures, slo_verdicts
from lmi_bench.analysis.results.latency import QUANTILES, samples_needed
from lmi_bench.catalog.instances import find_instance
from lmi_bench.cli.console import print_table, say, warn
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SLO_MISSED, InputError
from lmi_bench.core.run_store import load_run
from lmi_bench.core.scenario import AUTO, is_endpoint
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.units import format_figure
from lmi_bench.jobs.saved_recommendation import load_recommendation
from lmi_bench.jobs.sweep import run as sweep_run
from lmi_bench.jobs.verify_profile import check_learnable, known_profile, update
from lmi_bench.targets.access import Access

_FEWEST_REQUESTS = 300
_ENGINE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Replay:
    """The command's flags; None is what was left out."""

    recommendation: Path
    target: str
    share: float | None
    requests: int | None
    model: str | None
    api_key: str | None
    seed: int
    out: Path | None
    update_profile: Path | None = None


def run(replay: Replay, *, json_file: Path | None) -> int:
    """Replay, compare, print, save; returns the exit code."""
    plan = load_recommendation(replay.recommendation)
    candidate = plan["recommended"]
    share = _share(replay, candidate)
    profile = None
    if replay.update_profile is not None:
        copies = _serving(candidate) * int(candidate["replicas"])
        check_learnable(plan, candidate, share * copies)
        profile = known_profile(plan, replay.update_profile)
    folder = replay.out or Path("runs") / f"verify-{replay.recommendation.stem}"
    outcome = sweep_run.run(
        None,
        _overrides(replay, plan, candidate, share),
        sweep_run.SweepOptions(access=Access(replay.api_key)),
        out=folder,
        resume=False,
    )
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    if outcome.failed:
        return EXIT_FAILED
    line = load_run(folder).levels[-1]
    figures = list(compare_figures(candidate, line, share=share))
    slos = slo_verdicts(list(plan.get("slos") or ()), line)
    print_table("Predicted against measured", [_row(each) for each in figures], left=("figure",))
    outside = [each.name for each in figures if each.verdict == "outside"]
    known = [each for each in figures if each.verdict != "unknown"]
    say(f"{len(known) - len(outside)} of {len(known)} figures inside their intervals")
    missed = [slo for slo in slos if slo["verdict"] == "fail"]
    for slo in slos:
        why = slo["reason"] or f"measured {slo['measured_ms']:,.1f} ms"
        say(f"SLO {slo['slo']}: {slo['verdict']}, {why}")
    if json_file is not None:
        content = {
            "schema_version": 1,
            "recommendation": str(replay.recommendation),
            "run": str(folder),
            "share": share,
            "figures": [each.to_json() for each in figures],
            "slos": slos,
        }
        write_text(json_file, json.dumps(content, indent=2) + "\n")
        say(f"verification: {json_file}")
    if profile is not None and replay.update_profile is not None:
        update(
            plan,
            candidate,
            folder,
            profile,
            replay.update_profile,
            contradicted=bool(outside),
        )
    elif outside:
        say(
            "the profile does not describe this target: sweep it at several loads and plan "
            "again on that run (lmi-bench recommend RUN_DIR), or --update-profile P.json here"
        )
    return EXIT_SLO_MISSED if missed else 0


def _share(replay: Replay, candidate: Mapping[str, Any]) -> float:
    if replay.share is not None:
        if not 0 < replay.share <= 1:
            raise InputError(f"--share must be above 0 and at most 1, got {replay.share:g}")
        return replay.share
    if not replay.target.startswith("sim:"):
        return 1.0
    return 1 / (_serving(candidate) * int(candidate["replicas"]))


def _serving(candidate: Mapping[str, Any]) -> int:
    """Machines that the predicted latencies are of: those left after the planned-for failure."""
    availability = parse_availability(candidate["cost"]["availability"])
    return availability.surviving(int(candidate["instances"]))


def _overrides(
    replay: Replay, plan: Mapping[str, Any], candidate: Mapping[str, Any], share: float
) -> dict[str, Any]:
    """The planned load as a scenario: the rate, or as many users as wait at once."""
    slos = list(plan.get("slos") or ())
    requests = replay.requests or max(
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
        "target": replay.target,
        "model": replay.model or _model(replay.target, plan),
        **lengths,
        "load.requests_per_level": requests,
        "slo": slos,
        "seed": replay.seed,
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
    if replay.target.startswith("sim:"):
        simulated = find_instance(replay.target.removeprefix("sim:")).instance_type
        if simulated != candidate["instance"]:
            warn(f"the plan is for {candidate['instance']}; {simulated} is simulated instead")
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


def _row(each: Verified) -> dict[str, str]:
    def shown(value: float | None) -> str:
        return "" if value is None else format_figure(value)

    interval = "" if each.low is None else f"{shown(each.low)} to {shown(each.high)}"
    return {
        "figure": each.name,
        "predicted": shown(each.predicted),
        "interval": interval,
        "measured": shown(each.measured),
        "verdict": each.verdict,
    }
