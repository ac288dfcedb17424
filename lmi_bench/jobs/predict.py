"""One prediction: from the flags to a table and a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.fit import Estimate, fit_of_profile
from lmi_bench.analysis.fit.forecast import CAUSES, Forecast, forecast
from lmi_bench.analysis.level.cells import Cell
from lmi_bench.analysis.model.builtin_profiles import BUNDLED_CPU_PRIOR
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, planned_dtype
from lmi_bench.analysis.model.hardware_probe import LOCAL_NAME, probe_local_instance
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.speculation import Speculation
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import note, print_table, progress, say, warn
from lmi_bench.cli.options.load import parse_mix
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import Scenario, parse_scenario
from lmi_bench.core.units import format_figure
from lmi_bench.jobs.plan_speculation import planned_speculation
from lmi_bench.jobs.predict_simulated import Copy, SimulatedForecast, simulate_forecasts
from lmi_bench.targets.profiles import default_note, find_profile

_REQUESTS_PER_USER = 10
_LENGTH_SPREAD = 0.1  # real answers end at different lengths, which breaks up their queues
_OPEN_LOOP_S = 120.0
_MOST_REQUESTS, _LEAST_REQUESTS = 2000, 200


@dataclass(frozen=True, slots=True)
class Question:
    """The command's flags; None, 0 and () are what was left out."""

    model: str
    instance: str
    tensor_parallel: int
    replicas: int
    dtype: str | None
    kv_dtype: str | None
    input_tokens: int | None
    output_tokens: int | None
    concurrencies: str | None
    rates: str | None
    profile: str | None
    engine_version: str | None = None
    prefix_hit: float = 0.0
    mix: str | None = None
    input_lengths: str | None = None
    output_lengths: str | None = None
    trace: Path | None = None
    speed: str | None = None
    shared_prefix: int = 0
    seed: int = 0
    router: str | None = None
    draft: str | None = None
    draft_tokens: int | None = None
    draft_acceptance: str | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether its requests differ in ways that closed forms do not follow."""
        drawn = self.mix or self.input_lengths or self.output_lengths or self.trace
        return bool(drawn or self.shared_prefix or self.router)


def run(question: Question, *, json_file: Path | None) -> None:
    """Predict, print, save. Raises InputError for what cannot be asked or cannot run."""
    if question.speed is not None and question.trace is None:
        raise InputError("--speed is that of recorded traffic: add --trace FILE")
    if (told := dtype_note(question.model, question.dtype)) is not None:
        note(told)
    profile = _profile(question)
    machine = _machine(question.instance, profile)
    if question.is_simulated:
        _run_simulated(question, profile, machine, json_file)
        return
    spread = _LENGTH_SPREAD if profile.chunked_prefill else 0.0
    cells = [replace(cell, length_spread=spread) for cell in _cells(question, machine)]
    fit = fit_of_profile(profile, cells)
    forecasts = [forecast(fit, cell) for cell in cells]
    first = cells[0]
    lengths = {"input_tokens": first.input_tokens, "output_tokens": first.output_tokens}
    if first.cached_tokens:
        lengths["cached_tokens"] = first.cached_tokens
    _answer(
        _Shown(
            content={
                **_copy_facts(question, first.shape.name, machine, first.speculation),
                **lengths,
                "predictions": [each.to_json() for each in forecasts],
            },
            title=f"{first.input_tokens} in / {first.output_tokens} out",
            rows=[_row(each) for each in forecasts],
            notes=[
                *(
                    f"{regime}: {CAUSES[regime]}"
                    for regime in dict.fromkeys(map(_bound, forecasts))
                ),
                *(
                    f"no latency where {text}"
                    for text in dict.fromkeys(each.withheld for each in forecasts if each.withheld)
                ),
            ],
        ),
        question,
        profile,
        machine,
        first.speculation,
        json_file,
    )


@dataclass(frozen=True, slots=True)
class _Shown:
    """An answer: the file's content, and what a person reads."""

    content: dict[str, Any]
    title: str
    rows: list[dict[str, Any]]
    notes: list[str]


def _answer(
    shown: _Shown,
    question: Question,
    profile: EngineProfile,
    machine: Instance,
    speculation: Speculation | None,
    json_file: Path | None,
) -> None:
    warnings = profile.warnings_for(
        accelerator=machine.accelerator.name, engine_version=question.engine_version
    )
    warnings += profile.notes
    if json_file is not None:
        more = {"profile": profile.provenance, "interval": "80 %", "warnings": warnings}
        write_text(json_file, json.dumps({**shown.content, **more}, indent=1) + "\n")
    copies = "" if question.replicas == 1 else f", {question.replicas} copies"
    cache = "" if question.kv_dtype is None else f", {question.kv_dtype} cache"
    say(
        f"{shown.content['model']}, {shown.content['dtype']}{cache}, on {machine.instance_type}, "
        f"TP {question.tensor_parallel}{copies}, {shown.title}"
    )
    if speculation is not None:
        say(
            f"speculation: {speculation.draft_tokens} tokens guessed a step, each holds with "
            f"{speculation.acceptance:.2f}: {speculation.tokens_per_step:.2f} tokens a step"
        )
    say(profile.provenance)
    print_table("Predictions with 80 % intervals", shown.rows, left=("binds",))
    for text in shown.notes:
        say(text)
    default = default_note(question.profile)
    if default is not None and question.instance != LOCAL_NAME:
        note(default)
    for text in warnings:
        warn(text)
    if json_file is not None:
        say(f"predictions: {json_file}")


def _copy_facts(
    question: Question, model: str, machine: Instance, speculation: Speculation | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": model,
        "instance": machine.instance_type,
        "tensor_parallel": question.tensor_parallel,
        "replicas": question.replicas,
        "dtype": planned_dtype(question.model, question.dtype),
        "kv_dtype": question.kv_dtype,
    }
    if speculation is not None:
        facts["speculation"] = speculation.to_json()
    return facts


def _run_simulated(
    question: Question, profile: EngineProfile, machine: Instance, json_file: Path | None
) -> None:
    """Predict by the engine's own scheduler."""
    if question.prefix_hit:
        raise InputError(
            "--prefix-hit is for requests of one length; for others say --shared-prefix TOKENS"
        )
    if question.input_tokens is not None and question.shared_prefix >= question.input_tokens:
        raise InputError(
            f"--shared-prefix {question.shared_prefix}: prompts of {question.input_tokens} tokens "
            "share fewer, since the last one is always computed"
        )
    scenario = _scenario(question)
    speculation = planned_speculation(
        question.draft, question.draft_tokens, question.draft_acceptance
    )
    copy = Copy(
        shape=find_model(question.model),
        instance=machine,
        tensor_parallel=question.tensor_parallel,
        dtype=planned_dtype(question.model, question.dtype),
        kv_dtype=question.kv_dtype,
        speculation=speculation,
        replicas=question.replicas,
        router=scenario.engine.router,
        shared_tokens=question.shared_prefix,
    )
    with progress() as report:
        forecasts = simulate_forecasts(
            copy, profile, scenario, progress=lambda done, of: report("simulated levels", done, of)
        )
    _answer(
        _Shown(
            content={
                **_copy_facts(question, copy.shape.name, machine, speculation),
                "workload": scenario.workload.model_dump(exclude_defaults=True),
                "shared_tokens": question.shared_prefix,
                "router": scenario.engine.router,
                "predictions": [each.to_json() for each in forecasts],
            },
            title="simulated over the engine's scheduler",
            rows=[_simulated_row(each) for each in forecasts],
            notes=[
                f"{each.errors} of {each.requests} requests at load {each.load} do not fit"
                for each in forecasts
                if each.errors
            ],
        ),
        question,
        profile,
        machine,
        speculation,
        json_file,
    )


def _scenario(question: Question) -> Scenario:
    """The workload and the loads as a sweep would have them."""
    lengths = {"input_tokens": question.input_tokens, "output_tokens": question.output_tokens}
    workload: dict[str, Any] = {
        **lengths,
        "mix": None if question.mix is None else parse_mix(question.mix),
        "input_lengths": question.input_lengths,
        "output_lengths": question.output_lengths,
        "trace": None if question.trace is None else str(question.trace),
    }
    load: dict[str, Any] = {"requests_per_user": _REQUESTS_PER_USER}
    if question.trace is None:
        if (question.concurrencies is None) == (question.rates is None):
            raise InputError("give either --concurrency or --rate: the load to predict for")
        load["requests_per_level"] = None if question.rates is None else _LEAST_REQUESTS
    load |= {
        "concurrency": question.concurrencies and _whole_numbers(question.concurrencies),
        "rate_per_s": question.rates and list(_numbers("--rate", question.rates)),
        "speed": question.speed and list(_numbers("--speed", question.speed)),
    }
    content: dict[str, Any] = {
        "workload": {key: value for key, value in workload.items() if value is not None},
        "load": {key: value for key, value in load.items() if value is not None},
        "seed": question.seed,
    }
    if question.router is not None:
        content["engine"] = {"router": question.router.replace("-", "_")}
    return parse_scenario(content, source="the workload")


def _simulated_row(each: SimulatedForecast) -> dict[str, Any]:
    figures = each.figures
    return {
        "load": each.load,
        "tok/s": _interval(figures["throughput_tokens_per_s"]),
        "ms/token": _interval(figures["latency_ms_per_token"]),
        "TPOT ms": _interval(figures["tpot_ms"]),
        "TTFT ms": _interval(figures["ttft_ms"]),
        "TTFT p90 ms": _interval(figures["ttft_p90_ms"], absent="too few requests"),
    }


def _profile(question: Question) -> EngineProfile:
    """The named profile; without a name that of the machine's usual engine."""
    if question.profile is None and question.instance == LOCAL_NAME:
        return BUNDLED_CPU_PRIOR
    return find_profile(question.profile)


def _machine(name: str, profile: EngineProfile) -> Instance:
    """The machine of a name; `local` is this one, by the figures that the profile is fitted to."""
    if name != LOCAL_NAME:
        return find_instance(name)
    return probe_local_instance() if profile.machine is None else profile.machine.instance()


def _cells(question: Question, machine: Instance) -> Iterator[Cell]:
    if (question.concurrencies is None) == (question.rates is None):
        raise InputError("give either --concurrency or --rate: the load to predict for")
    if question.input_tokens is None or question.output_tokens is None:
        raise InputError(
            "give --input-tokens and --output-tokens, or --mix, --input-lengths or --trace"
        )
    for name, value in (
        ("--input-tokens", question.input_tokens),
        ("--output-tokens", question.output_tokens),
        ("--tp", question.tensor_parallel),
    ):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    found = min(int(question.prefix_hit * question.input_tokens), question.input_tokens - 1)
    common: dict[str, Any] = {
        "shape": find_model(question.model),
        "instance": machine,
        "tensor_parallel": question.tensor_parallel,
        "dtype": planned_dtype(question.model, question.dtype),
        "input_tokens": question.input_tokens,
        "output_tokens": question.output_tokens,
        "replicas": question.replicas,
        "kv_dtype": question.kv_dtype,
        "cached_tokens": found,
        "speculation": planned_speculation(
            question.draft, question.draft_tokens, question.draft_acceptance
        ),
    }
    for users in _whole_numbers(question.concurrencies or ""):
        yield Cell(**common, concurrency=users, num_requests=_REQUESTS_PER_USER * users)
    for rate in _numbers("--rate", question.rates or ""):
        requests = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, math.ceil(rate * _OPEN_LOOP_S)))
        yield Cell(**common, concurrency=0, rate_per_s=rate, num_requests=requests)


def _whole_numbers(text: str) -> list[int]:
    found = list(_numbers("--concurrency", text))
    for users in found:
        if users != int(users):
            raise InputError(f"--concurrency takes whole numbers, got {users:g}")
    return [int(users) for users in found]


def _numbers(flag: str, text: str) -> Iterator[float]:
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            value = float(part)
        except ValueError:
            raise InputError(f"{flag} {text!r}: {part!r} is not a number") from None
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{flag} must be above 0, got {part}")
        yield value


def _row(each: Forecast) -> dict[str, Any]:
    cell = each.cell
    load = str(cell.concurrency) if cell.rate_per_s is None else f"{cell.rate_per_s:g}/s"
    return {
        "load": load,
        "tok/s": _interval(each.figures["throughput_tokens_per_s"]),
        "ms/token": _interval(each.figures["latency_ms_per_token"]),
        "TPOT ms": _interval(each.figures["tpot_ms"]),
        "TTFT ms": _interval(each.figures["ttft_ms"]),
        "capacity tok/s": _interval(each.capacity_tokens_per_s),
        "binds": each.regime,
    }


def _bound(each: Forecast) -> str:
    return each.regime


def _interval(figure: Estimate | None, *, absent: str = "withheld") -> str:
    if figure is None:
        return absent
    return "{} [{} to {}]".format(*map(format_figure, (figure.value, figure.low, figure.high)))
