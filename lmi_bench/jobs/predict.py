"""Throughput and latency of a model on a machine that is not rented yet."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lmi_bench.analysis.fit import forecast as predicted
from lmi_bench.analysis.fit.fit import fit_of_profile
from lmi_bench.analysis.fit.uncertainty import under_load
from lmi_bench.analysis.level.simulator import Requests
from lmi_bench.analysis.model.builtin_profiles import BUNDLED_CPU_PRIOR
from lmi_bench.analysis.model.capacity import smallest_degree
from lmi_bench.analysis.model.checkpoint_dtype import planned_dtype
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, probe_machine
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import PLAIN, PrefillPool, Setup, pools_bytes_per_s
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_mix
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.load import Load
from lmi_bench.core.option import numbers
from lmi_bench.core.scenario import Scenario, parse_scenario
from lmi_bench.engine.router import make_router
from lmi_bench.jobs.planned import model_notes, planned_speculation, prompt_fields
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.jobs.settings.plan import PredictSettings
from lmi_bench.loadgen.run.sweep import levels_of
from lmi_bench.targets.profiles import default_note, find_profile, with_host
from lmi_bench.targets.prompts import PlannedPrompts, longest_request, repeats_text

_GIGABIT_BYTES = 1e9 / 8
_REQUESTS_PER_USER, _LEAST, _SESSIONS = 10, 200, 1000
_WARM, _MOST_TO_WARM = 4, 1000  # requests for each document that come before those that count


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of every load, and what it is for.

    forecasts  of equal requests
    simulated  of all others, which `scenario` describes
    """

    settings: PredictSettings
    setup: Setup
    profile: EngineProfile
    warnings: list[str]
    forecasts: tuple[predicted.Forecast, ...] = ()
    scenario: Scenario | None = None
    simulated: tuple[predicted.Forecast, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `predict --json` writes it."""
        content: dict[str, Any] = {
            "model": self.setup.shape.name,
            "instance": self.setup.instance.instance_type,
            "tensor_parallel": self.setup.tensor_parallel,
            "replicas": self.settings.replicas,
            "dtype": self.setup.dtype,
            "kv_dtype": self.settings.kv_dtype,
        }
        if self.setup.parallelism != PLAIN:
            content["parallelism"] = self.setup.parallelism.to_json()
        if (workers := self.settings.workers) is not None:
            pool = _prefill_pool(self.settings, self.setup)
            assert pool is not None
            content["replicas"] = workers[1]
            content["prefill"] = {
                "workers": workers[0],
                "tensor_parallel": pool.setup.tensor_parallel,
                "link_bytes_per_s": pool.link_bytes_per_s,
            }
        if self.setup.speculation is not None:
            content["speculation"] = self.setup.speculation.to_json()
        return {
            **content,
            **self._workload(),
            "predictions": [each.to_json() for each in (*self.forecasts, *self.simulated)],
            "profile": self.profile.provenance,
            "interval": "80 %",
            "warnings": self.warnings,
        }

    def _workload(self) -> dict[str, Any]:
        if self.scenario is not None:
            return {
                "workload": self.scenario.workload.model_dump(exclude_defaults=True),
                "router": self.scenario.engine.router,
                **stated_settings(self.settings.host_cache),
            }
        first = self.forecasts[0].cell
        assert first is not None
        lengths = {"input_tokens": first.input_tokens, "output_tokens": first.output_tokens}
        return lengths | ({"cached_tokens": first.cached_tokens} if first.cached_tokens else {})


def predict(settings: PredictSettings, listener: Listener = SILENT) -> Prediction:
    """Predict each load. Raises InputError for what is unknown or cannot run."""
    for each in model_notes(settings.model, settings.dtype):
        listener.note(each)
    is_local = settings.instance == LOCAL_NAME
    profile = find_profile(settings.profile, settings.kv_tokens)
    if settings.profile is None and is_local:
        profile = replace(BUNDLED_CPU_PRIOR, cache_tokens=settings.kv_tokens)
    local = (profile.machine or probe_machine()).instance() if is_local else None
    machine = local or find_instance(settings.instance)
    warnings = profile.warnings_for(accelerator=machine.accelerator.name, engine_version=settings.engine_version)
    shape = find_model(settings.model)
    setup = Setup(
        shape,
        machine,
        settings.tensor_parallel or 1,
        planned_dtype(settings.model, settings.dtype),
        kv_dtype=settings.kv_dtype,
        speculation=planned_speculation(settings.speculation, shape),
    )
    split = EngineSetting(
        expert_parallel=settings.ep or None,
        dp_attention=settings.dp_attention or None,
        pipeline=None if settings.pp == 1 else settings.pp,
        hosts=None if settings.hosts == 1 else settings.hosts,
    )
    if split.split and settings.tensor_parallel is None:
        raise InputError(f"{split.split}: add --tp, the devices that a copy or a stage is split over")
    parallelism = split.parallelism(machine, setup.tensor_parallel)
    if (gbps := settings.network_gbps) is not None:
        parallelism = replace(parallelism, network_bytes_per_s=gbps * _GIGABIT_BYTES)
    setup = replace(setup, parallelism=parallelism)
    scenario = _scenario(settings) if settings.is_simulated else None
    if settings.tensor_parallel is None:
        equal = (settings.input_tokens or 1) + (settings.output_tokens or 1)
        longest = equal if scenario is None else longest_request(scenario)
        setup = replace(setup, tensor_parallel=smallest_degree(setup, profile, longest))
    setup = setup.beside(settings.replicas)
    if setup.host_copies > 1:
        warnings.append(
            f"{setup.host_copies} copies share a host: {setup.host_copies} x one copy is an upper "
            "bound; the interval reaches lower, for what they share beside its processor"
        )
    blank = Prediction(settings, setup, profile, [*warnings, *profile.notes], scenario=scenario)
    if scenario is not None:
        answer = _simulated(blank, scenario, listener)
    else:
        cells = list(_cells(blank))
        fit = fit_of_profile(profile, cells)
        answer = replace(blank, forecasts=tuple(predicted.forecast(fit, cell) for cell in cells))
    if not is_local and (text := default_note(settings.profile)) is not None:
        listener.note(text)
    return answer


def _prefill_pool(settings: PredictSettings, setup: Setup) -> PrefillPool | None:
    """The workers that compute prompts, split as those that decode unless their degree differs."""
    if settings.workers is None:
        return None
    prefill, decode = settings.workers
    worker = setup.prefill_worker(settings.prefill_tp or setup.tensor_parallel)
    link = setup.parallelism.network_bytes_per_s
    if settings.network_gbps is None:
        devices = prefill * worker.devices + decode * setup.devices
        link = pools_bytes_per_s(setup.instance, devices)
    return PrefillPool(worker, prefill, link)


def _cells(blank: Prediction) -> Iterator[MeasuredLevel]:
    """Equal requests under each load."""
    settings = blank.settings
    assert settings.input_tokens is not None
    assert settings.output_tokens is not None
    found = min(int(settings.prefix_hit * settings.input_tokens), settings.input_tokens - 1)
    setup = _setup(blank, settings.input_tokens, settings.output_tokens, found)
    for users in _whole_numbers(settings.concurrency or ""):
        yield under_load(setup, blank.profile, Load(users))
    for rate in _numbers("--rate", settings.rate or ""):
        yield under_load(setup, blank.profile, Load(rate_per_s=rate))


def _setup(blank: Prediction, input_tokens: int, output_tokens: int, cached_tokens: int) -> MeasuredLevel:
    """Requests of these lengths on the set-up, under one user."""
    workers = blank.settings.workers
    return MeasuredLevel(
        blank.setup,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        load=Load(1),
        num_requests=1,
        cached_tokens=cached_tokens,
        replicas=blank.settings.replicas if workers is None else workers[1],
        prefill=_prefill_pool(blank.settings, blank.setup),
    )


def _simulated(blank: Prediction, scenario: Scenario, listener: Listener) -> Prediction:
    """Unequal requests, simulated with the engine's own scheduler."""
    caches = blank.settings.prefix_cache and repeats_text(scenario)
    setup = _setup(blank, 1, 1, 0)
    if caches and setup.prefill is not None:
        raise InputError("two pools are simulated without a prefix cache: add --no-prefix-cache")
    planned = PlannedPrompts(scenario)
    forecasts = []
    levels = levels_of(scenario)
    for place, level in enumerate(levels):
        listener.progress("simulated levels", place, len(levels))
        spec, corpus = replace(level, warmup_requests=0), scenario.workload.corpus
        if corpus is not None and spec.load.is_open and not spec.load.sessions:
            first = min(_MOST_TO_WARM, _WARM * corpus[0])  # a cold cache finds less
            spec = replace(spec, start_requests=first, num_requests=max(spec.num_requests or 0, 2 * first))
        request: Requests = partial(planned.single, spec)
        if spec.load.sessions and spec.rate_per_s is not None:
            rate_per_s = spec.rate_per_s * planned.mean_turns
            load = replace(spec.load, rate_per_s=rate_per_s, arrivals="trace")
            spec, request = replace(spec, load=load), planned.at(rate_per_s, scenario.seed)
        forecasts.append(
            predicted.simulated_forecast(
                setup,
                with_host(blank.profile, scenario.engine, caches),
                spec,
                request,
                total_tokens=longest_request(scenario),
                seed=scenario.seed,
                router=make_router(scenario.engine.router),
                prefix_caching=caches,
            )
        )
    return replace(blank, simulated=tuple(forecasts))


def _scenario(settings: PredictSettings) -> Scenario:
    workload = prompt_fields(settings) | {
        "mix": None if settings.mix is None else parse_mix(settings.mix),
        "input_lengths": settings.input_lengths,
        "output_lengths": settings.output_lengths,
    }
    is_open = settings.trace is None and settings.rate is not None
    load: dict[str, Any] = {
        "requests_per_user": _REQUESTS_PER_USER,
        "requests_per_level": (_SESSIONS if settings.turns else _LEAST) if is_open else None,
        "concurrency": settings.concurrency and _whole_numbers(settings.concurrency),
        "rate_per_s": settings.rate and _numbers("--rate", settings.rate),
        "speed": settings.speed and _numbers("--speed", settings.speed),
    }
    content: dict[str, Any] = {
        "workload": {key: value for key, value in workload.items() if value is not None},
        "load": {key: value for key, value in load.items() if value is not None},
        "engine": stated_settings(settings.host_cache),
        "seed": settings.seed,
    }
    if settings.router is not None:
        content["engine"]["router"] = settings.router.replace("-", "_")
    return parse_scenario(content, source="the workload")


def _whole_numbers(text: str) -> list[int]:
    found = _numbers("--concurrency", text)
    for users in found:
        if users != int(users):
            raise InputError(f"--concurrency takes whole numbers, got {users:g}")
    return [int(users) for users in found]


def _numbers(flag: str, text: str) -> list[float]:
    found = [float(value) for value in numbers(flag, text)] if text else []
    for value in found:
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{flag} must be above 0, got {value:g}")
    return found
