"""The shipped profiles: constants with their origin and uncertainty, and priors to fit from."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any, Final

from lmi_bench.analysis.model.memory import weight_format
from lmi_bench.analysis.model.profiles import (
    V1,
    EngineProfile,
    generation,
    generations,
    profile_from_document,
    profile_from_json,
    vllm_defaults,
)
from lmi_bench.catalog.accelerators import Accelerator, find_accelerator, is_accelerator
from lmi_bench.catalog.models import all_model_entries

_PROFILES = files("lmi_bench.catalog") / "data" / "profiles"


def _read(name: str) -> str:
    return (_PROFILES / f"{name}.json").read_text(encoding="utf-8")


def _priors() -> dict[str, EngineProfile]:
    """The priors of `priors.json` by key; one that is `based_on` another states what differs."""
    found: dict[str, dict[str, Any]] = {}
    for key, given in json.loads(_read("priors")).items():
        base = found.get(given.pop("based_on", None), {})
        for name in ("about", "sources"):  # for readers of the file
            given.pop(name, None)
        for name in ("parameters", "log_sd"):
            given[name] = {**base.get(name, {}), **given.get(name, {})}
        found[key] = {**base, **given}
    return {key: profile_from_document(document) for key, document in found.items()}


_PRIOR: Final = _priors()
EAGER_GPU_PRIOR: Final = _PRIOR["eager_gpu"]
GRAPH_GPU_PRIOR: Final = _PRIOR["graph_gpu"]
TGI_GRAPH_PRIOR: Final = _PRIOR["tgi_graph"]
SGLANG_PRIOR: Final = _PRIOR["sglang"]
TRT_LLM_PRIOR: Final = _PRIOR["trt_llm"]
TGI_3_PRIOR: Final = _PRIOR["tgi_3"]
VLLM_V0_PRIOR: Final = _PRIOR["vllm_v0"]
VLLM_0_6_PRIOR: Final = _PRIOR["vllm_0_6"]
BUNDLED_CPU_PRIOR: Final = _PRIOR["bundled_cpu"]
SERVED_CPU_PRIOR: Final = _PRIOR["served_cpu"]

# Fitted by benchmarks/fit_profiles.py --refit, which prints their errors.
TGI_2023: Final = profile_from_json(_read("tgi_2023"))
VLLM: Final = profile_from_json(_read("vllm"))
VLLM_0_12: Final = profile_from_json(_read("vllm_0_12"))
VLLM_0_19: Final = profile_from_json(_read("vllm_0_19"))
SGLANG_B200: Final = profile_from_json(_read("sglang_b200"))
SGLANG_MI300X: Final = profile_from_json(_read("sglang_mi300x"))
SGLANG_MI355X: Final = profile_from_json(_read("sglang_mi355x"))
TRT_LLM_H200: Final = profile_from_json(_read("trt_llm_h200"))
TRT_LLM_B200: Final = profile_from_json(_read("trt_llm_b200"))
BUNDLED_H200: Final = profile_from_json(_read("bundled_h200"))
_FITTED: Final = (
    *(TGI_2023, VLLM, VLLM_0_12, VLLM_0_19, BUNDLED_H200),
    *(SGLANG_B200, SGLANG_MI300X, SGLANG_MI355X, TRT_LLM_H200, TRT_LLM_B200),
)

_EAGER_ENGINES = ("tgi", "text-generation-inference", "huggingface", "deepspeed")
_TRT_LLM: Final = ("tensorrt", "trt")
_SERVED_TRT_LLM: Final = (0, 16)  # `trtllm-serve` came with this version
_LEAST_LOG_SD = 0.05
FEW_BITS: Final = 8
_OF_DEVICE: Final = ("gap_per_layer_s", "host_per_sequence_s", "bandwidth_share")
_ON_AMD: Final = {"moe_share": 0.1, "request_overhead_s": 0.02}  # as SGLang's fits on two devices
_V1_OF_VLLM: Final = (0, 8)
_OVERLAPPED_VLLM: Final = (0, 6)
_GRAPHS_OF_TGI: Final = (2, 0)
_CHUNKS_OF_TGI: Final = (3, 0)
_VERSION = re.compile(r"\bv?(\d+)\.(\d+)(?:\.(\d+))?")


def prior_of_engine(
    engine: str,
    *,
    models: Collection[str],
    accelerators: Collection[str],
    open_loop: bool,
    few_bits: bool = False,
    marks: Collection[str] = (),
) -> EngineProfile:
    """The profile to start a fit of that engine from.

    engine  name in a table, with its version if known; empty for the endpoints of 2023. The
            version selects the engine's generation and the nearest shipped profile
    few_bits  whether the weights have fewer than eight bits
    marks   marks of the measured levels (`measured_level.marks_of`)

    A shipped profile that was fitted to one of those levels is left out (without marks: to one of
    the models on one of the accelerators), so that no profile is judged on its own training data.
    """
    version = _version_of(engine)
    eager = not engine or engine.startswith(_EAGER_ENGINES)
    general, kin = GRAPH_GPU_PRIOR, list[EngineProfile]()
    if eager and (version is None or version < _GRAPHS_OF_TGI):
        general, kin = EAGER_GPU_PRIOR, [TGI_2023]
    elif eager:
        assert version is not None
        general = TGI_GRAPH_PRIOR if version < _CHUNKS_OF_TGI else TGI_3_PRIOR
    elif engine.startswith("sglang"):
        general, kin = SGLANG_PRIOR, [SGLANG_B200, SGLANG_MI300X, SGLANG_MI355X]
    elif engine.startswith(_TRT_LLM) and version is not None and version < _SERVED_TRT_LLM:
        general = _PRIOR["trt_llm_alone"]
    elif engine.startswith(_TRT_LLM):
        general, kin = TRT_LLM_PRIOR, [TRT_LLM_B200, TRT_LLM_H200]
    elif engine.startswith("vllm"):
        if version is not None and version < _V1_OF_VLLM:
            v0 = VLLM_V0_PRIOR if version < _OVERLAPPED_VLLM else VLLM_0_6_PRIOR
            return replace(v0, defaults=vllm_defaults(version))
        general = replace(GRAPH_GPU_PRIOR, defaults=V1)
        kin = [VLLM_0_19, VLLM_0_12] if open_loop else [VLLM_0_12, VLLM_0_19]
        if version is not None:
            kin.sort(key=partial(_distance, version))
        kin = [VLLM, *kin]
    devices = [find_accelerator(name) for name in accelerators if is_accelerator(name)]
    if any(device.vendor == "amd" for device in devices):
        general = replace(general, parameters=replace(general.parameters, **_ON_AMD))
    for profile in _akin(kin, models, devices, few_bits):
        if not _has_seen(profile, models, accelerators, marks):
            near, known = widened(profile, general), generations(profile)
            return near if any(generation(d) in known for d in devices) else _halfway(near, general)
    return general


def _halfway(profile: EngineProfile, general: EngineProfile) -> EngineProfile:
    """For another generation: what depends on the device differs as much between those as between
    engines (a layer's gap threefold between AMD's two, so one says nothing of the other); the
    server's own time outside the steps does not."""
    own, other = profile.parameters, general.parameters
    weight = 0.0 if "amd" in profile.vendors else 0.5
    middle = {name: getattr(own, name) ** weight * getattr(other, name) ** (1 - weight) for name in _OF_DEVICE}
    return replace(profile, parameters=replace(own, **middle))


def _akin(
    kin: list[EngineProfile], models: Collection[str], devices: list[Accelerator], few_bits: bool
) -> list[EngineProfile]:
    """Those for the vendor of the devices, of their generation first.

    Profiles of mixtures alone are left out for a dense model, and for few bits if they saw none.
    """
    wanted = _mixtures_only(models)
    own = {generation(device) for device in devices}
    found = [
        profile
        for profile in kin
        if all(device.vendor in profile.vendors for device in devices)
        and (not _mixtures_only(profile.models) or (wanted and (not few_bits or has_few(profile))))
    ]
    return sorted(found, key=lambda profile: own.isdisjoint(generations(profile)))


def has_few(profile: EngineProfile) -> bool:
    """Whether weights of fewer than eight bits were in its fit."""
    return any(weight_format(name).nominal_bits < FEW_BITS for name in profile.formats)


def _mixtures_only(models: Collection[str]) -> bool:
    shapes = [entry.shape for entry in all_model_entries() if entry.shape.name in models]
    return bool(shapes) and all(shape.is_moe for shape in shapes)


def _has_seen(
    profile: EngineProfile, models: Collection[str], accelerators: Collection[str], marks: Collection[str]
) -> bool:
    if profile.fitted_cells and marks:
        return not set(profile.fitted_cells).isdisjoint(marks)
    return bool(set(profile.models) & set(models) and set(profile.accelerators) & set(accelerators))


def _version_of(engine: str) -> tuple[int, ...] | None:
    """The version in `vllm 0.6.3.post1`: (0, 6, 3); None without one."""
    found = _VERSION.search(engine)
    return None if found is None else tuple(int(part) for part in found.groups() if part)


def _distance(version: tuple[int, ...], profile: EngineProfile) -> int:
    """Difference in minor versions; a major version counts as 1,000 of them."""
    own = _version_of(profile.version)
    if own is None:
        return 10**6
    return abs(version[0] - own[0]) * 1000 + abs(version[1] - own[1])


def widened(profile: EngineProfile, general: EngineProfile) -> EngineProfile:
    """The profile as a prior for other levels: twice its standard deviations, uncorrelated.

    A level was measured, so its engine does load that model on that device.
    """
    return replace(
        profile,
        architectures=(),
        dtypes=(),
        compute_capability=0.0,
        log_sd={
            name: min(general.log_sd.get(name, sd), max(2 * sd, _LEAST_LOG_SD)) for name, sd in profile.log_sd.items()
        },
        log_correlation=(),
    )


def shipped_profile(provenance: str) -> EngineProfile | None:
    """The profile with this provenance among those that ship."""
    known = (*_PRIOR.values(), *_FITTED)
    return next((each for each in known if each.provenance == provenance), None)
