"""Engine profiles: constants of one engine version and their covariance, default settings.

Published tables do not state the scheduler's settings, so the engine's defaults are the likeliest
values. vLLM before 0.5.4: whole prompts, as many in a step as one of the model's context. From
0.5.4 to 0.7, of models with more than 32,768 positions (and no sliding window): chunks, 512 tokens
a step (pull request 6666), 2,048 from 0.6.5 on (10544). From 0.8 on (V1): chunks, 8,192 tokens and
1,024 sequences on devices of at least 70 GiB but for the A100, else 2,048 and 256 (`arg_utils.py`,
a server's context). SGLang: prompt steps by the device's memory (`server_args.py`).

On devices and models that a profile was not fitted to, the doubts of its constants are wider: other
kernels have other times of a layer, and most machines do not state a shared host bridge.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from lmi_bench.analysis.model.local_machine import MeasuredMachine
from lmi_bench.analysis.model.measured_level import MeasuredLevel, cell_from_json, cell_to_json
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import Accelerator, find_accelerator, is_accelerator
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import check_types
from lmi_bench.core.units import GIB
from lmi_bench.engine.scheduling.config import DEFAULT_WAITING_SERVED_RATIO, KvLayout
from lmi_bench.models.shape import ModelShape

PROFILE_SCHEMA = 1
_MOST, _LEAST = 100.0, 1e-9  # of what a step time is multiplied with or divided by
_MOST_BYTES = 1e15


@dataclass(frozen=True, slots=True)
class StepParameters:
    """The engine's part of a step's time: shares of the data sheet, times in seconds.

    bandwidth_share          memory bandwidth of decode reads
    compute_share            dense peak of prefill
    host_per_layer_s         launch of a layer's kernels in a step; small with CUDA graphs
    host_per_sequence_s      bookkeeping of a running sequence in a step
    host_per_prompt_token_s  preparation of a prompt token
    host_per_prompt_s        admission of a prompt or of its next chunk: blocks, sampling, answer
    narrow_launch_s          extra launch of a layer with 4-bit weights, decoding on several ranks
    host_stretch_per_rank    relative growth of both host times with each further rank
    nvlink_latency_s, pcie_latency_s   start of one all-reduce
    nvlink_share, pcie_share           rate of the link in an all-reduce
    gap_per_layer_s          time of a layer's kernels beyond reads, arithmetic and all-reduces
    moe_share                rate of routed experts' products, relative to dense products
    attention_share          rate of attention's products, relative to dense products
    rows_read_share          rate of weight reads for several rows, relative to one row: packed
                             blocks instead of a stream on processors
    narrow_share             arithmetic rate of products that widen 4-bit weights, relative to
                             16-bit products; with 8 bits its square root
    narrow_read_share        the same for the rate of reading these weights
    unhidden_share           part of the shorter of reads and arithmetic that adds to the longer:
                             0 on GPUs; processors hide little
    request_overhead_s       time of a request outside the steps: parsing, tokenizing, sending
    """

    bandwidth_share: float
    compute_share: float
    host_per_layer_s: float
    host_per_sequence_s: float
    host_per_prompt_token_s: float
    host_stretch_per_rank: float
    nvlink_latency_s: float
    nvlink_share: float
    pcie_latency_s: float
    pcie_share: float
    gap_per_layer_s: float = 0.0
    request_overhead_s: float = 0.0
    moe_share: float = 1.0
    attention_share: float = 1.0
    unhidden_share: float = 0.0
    rows_read_share: float = 1.0
    narrow_share: float = 1.0
    host_per_prompt_s: float = 0.0
    narrow_launch_s: float = 0.0
    narrow_read_share: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            rate = item.name.endswith("_share") and item.name != "unhidden_share"
            if not value >= (_LEAST if rate else 0):
                raise InputError(f"profile parameter {item.name} must be above 0, got {value:g}")


HOST_PREFIX: Final = "host_factor:"  # of a free parameter that is the slowness of a host
PARAMETER_NAMES: tuple[str, ...] = tuple(item.name for item in fields(StepParameters))


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine version as the planner models it.

    fitted_on, fitted_date  origin of the parameters, for display
    accelerators, models    names in the fit; other devices are an extrapolation
    vendors                 vendors of the devices that the engine runs on
    memory_share            limit on the engine's share of a device's memory
    reserve_bytes           part of that memory for the runtime, and for activations where
                            reserves_activations is False: then they are planned by the model and
                            the tokens of a step. reserve_bytes_per_token: for a token of a step
    cache_tokens            tokens that the cache of a copy holds, as the server logs it; None: by
                            memory
    host_cache_bytes        host memory of a copy for what its prefix cache evicts; 0: none
    host_bytes_per_s        rate of its copies back to each device; None: by the device's PCIe link
    kv_layout               how the engine reserves the cache at admission
    log_sd                  standard deviation of each parameter's logarithm; absent: exact
    log_correlation         of these logarithms, rows in the order of PARAMETER_NAMES; empty: none
    host_factors            host slowness by accelerator, 1 is usual
    host_factor_log_sd      prior of a factor's logarithm; 0: never fitted
    residual_log_sd         standard deviation of ln(truth / prediction) with the best parameters
    error_scale             fitted factor on the model's error and noise;
                            ttft_error_scale: on that of times to first token
    levels                  measured levels that correct predictions
    formats                 number formats of the weights in the fit
    fitted_lengths          least and most (prompt, answer, users of a copy) of the fit's levels
    up_to                   additive terms of which only a limit is known, in seconds: `log_sd` is
                            then of value / limit instead of the logarithm
    fitted_cells            marks of the levels of a shipped profile's fit (`marks_of`)
    widen_first_rows        rows of a step from which narrow weights are widened as a whole before
                            their products; 0: never
    architectures           names in config.json of what the engine loads; empty: any
    dtypes                  number formats of weights that it loads; empty: any
    compute_capability      lowest one of CUDA that it runs on
    shared_head_dims        head sizes whose decode step reads the cache once for all query heads
                            of a KV head; empty: all sizes
    max_waiting_tokens, waiting_served_ratio  when waiting prompts pause decoding (`JoinRule`)
    split_attention         whether decode attention splits a long context over several blocks;
                            else one block reads the cache of a sequence and KV head
    engine_named            False where nobody said which engine serves: intervals are then wider
    defaults                rule for the scheduler's settings by model and device
                            (`as_set`); empty: the settings of the profile
    machine                 figures of the machine `local`, if the fit was made on it
    capture                 how and where its levels were measured (`calibrate --on`), for those who
                            get the profile; empty: they were not measured together
    """

    name: str
    version: str
    fitted_on: str
    fitted_date: str
    accelerators: tuple[str, ...]
    vendors: tuple[str, ...]
    parameters: StepParameters
    log_sd: Mapping[str, float]
    residual_log_sd: float
    memory_share: float
    reserve_bytes: float
    kv_layout: KvLayout
    max_batch_size: int
    max_prefill_tokens: int
    chunked_prefill: bool = False
    max_waiting_tokens: int = 0
    waiting_served_ratio: float = DEFAULT_WAITING_SERVED_RATIO
    split_attention: bool = True
    block_size: int = 16
    reserves_activations: bool = True
    reserve_bytes_per_token: float = 0.0
    cache_tokens: int | None = None
    host_cache_bytes: float = 0.0
    host_bytes_per_s: float | None = None
    log_correlation: tuple[tuple[float, ...], ...] = ()
    host_factors: Mapping[str, float] = field(default_factory=dict)
    host_factor_log_sd: float = 0.0
    models: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error_scale: float = 1.0
    ttft_error_scale: float = 1.0
    levels: tuple[MeasuredLevel, ...] = ()
    machine: MeasuredMachine | None = None
    fitted_cells: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    fitted_lengths: tuple[tuple[int, ...], ...] = ()
    up_to: Mapping[str, float] = field(default_factory=dict)
    engine_named: bool = True
    defaults: str = ""
    widen_first_rows: int = 0
    shared_head_dims: tuple[int, ...] = ()
    architectures: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    compute_capability: float = 0.0
    capture: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size, correlation = len(PARAMETER_NAMES), self.log_correlation
        unknown = set(self.log_sd) - set(PARAMETER_NAMES)
        spreads = (*self.log_sd.values(), self.residual_log_sd, self.host_factor_log_sd)
        parameters = (getattr(self.parameters, name) for name in PARAMETER_NAMES)
        scales = (*parameters, *spreads, self.error_scale, self.ttft_error_scale)
        is_square = all(len(row) == len(correlation) for row in correlation)
        values = [getattr(self, each.name) for each in fields(self)]
        most = max(abs(each) for each in values if isinstance(each, (int, float)))
        least = min(self.up_to.values(), default=1.0)
        share, block = self.memory_share, self.block_size
        in_range = all(0 <= each <= _MOST for each in scales)
        for holds, rule in (
            (is_square and len(correlation) <= size, f"the correlation must be {size} by {size}"),
            (not unknown, f"unknown parameters {sorted(unknown)}"),
            (in_range, f"parameters, spreads and scales must be 0 to {_MOST:g}"),
            (is_square and np.abs(correlation).max(initial=0) <= 1.01, "correlations are -1 to 1"),
            (0 < share <= 1, f"memory_share must be above 0 and at most 1, got {share:g}"),
            (block >= 1, f"block_size must be at least 1, got {block}"),
            (least >= _LEAST, f"limits in up_to must be at least {_LEAST:g}, got {least:g}"),
            (most <= _MOST_BYTES, f"numbers must be at most {_MOST_BYTES:g}, got {most:g}"),
        ):
            if not holds:
                raise InputError(f"profile {self.label}: {rule}")

    @property
    def label(self) -> str:
        """Name and version: `TGI 1.x (2023)`."""
        return f"{self.name} {self.version}"

    @property
    def provenance(self) -> str:
        """Origin of the parameters, in one line."""
        if not self.accelerators:  # a prior: not fitted to anything
            return f"profile {self.label}, fitted to {self.fitted_on}"
        return f"profile {self.label}, fitted {self.fitted_date} on {self.fitted_on}"

    def warnings_for(self, *, accelerator: str, engine_version: str | None = None) -> list[str]:
        """Warnings about extrapolations of this profile to that device and engine version."""
        warnings = []
        if accelerator not in self.accelerators:
            known = f"but on {', '.join(self.accelerators)}" if self.accelerators else "or elsewhere"
            warnings.append(
                f"profile {self.label} was not fitted on {accelerator} {known}: its shares of the "
                "peak rates are assumed there"
            )
        if engine_version is not None and not _same_version(engine_version, self.version):
            warnings.append(
                f"profile {self.label} is not for version {engine_version}: calibrate on a sweep of that version"
            )
        return warnings

    def warning_for_engine(self, engine: str) -> str | None:
        """The warning about this profile for an engine as a table names it, if any."""
        name, _, version = engine.partition(" ")
        if name and name.lower() != self.name.lower():
            return f"profile {self.label} is not for {engine}: calibrate on levels of that engine"
        if version and not _same_version(version, self.version):
            return f"profile {self.label} is not for version {version}: calibrate on its levels"
        return None

    def log_covariance(self, names: Sequence[str], sd: NDArray[np.float64]) -> NDArray[np.float64]:
        """Covariance of these parameters' logarithms; of those it does not state, sd alone."""
        covariance = np.diag(sd**2)
        own = [index for index, name in enumerate(names) if name in PARAMETER_NAMES]
        places = [PARAMETER_NAMES.index(names[index]) for index in own]
        known = len(self.log_correlation)  # parameters added later are uncorrelated
        correlation = np.eye(len(PARAMETER_NAMES))
        if known:
            correlation[:known, :known] = self.log_correlation
        own_sd = np.array([self.log_sd.get(names[index], 0.0) for index in own])
        covariance[np.ix_(own, own)] = correlation[np.ix_(places, places)] * np.outer(own_sd, own_sd)
        return covariance


def log_value(profile: EngineProfile, name: str) -> float:
    """Logarithm of a free parameter's value; its share of the limit if only a limit is known."""
    if name in profile.up_to:
        return float(getattr(profile.parameters, name)) / profile.up_to[name]
    if name.startswith(HOST_PREFIX):
        return math.log(profile.host_factors.get(name.removeprefix(HOST_PREFIX), 1.0))
    return math.log(max(getattr(profile.parameters, name), 1e-12))


def with_logs(base: EngineProfile, names: Sequence[str], logs: NDArray[np.float64]) -> EngineProfile:
    """The base profile with these logarithms of the named parameters."""
    values = {name: getattr(base.parameters, name) for name in PARAMETER_NAMES}
    hosts = dict(base.host_factors)
    for name, log in zip(names, logs.tolist(), strict=True):
        if name.startswith(HOST_PREFIX):
            hosts[name.removeprefix(HOST_PREFIX)] = math.exp(log)
        elif name in base.up_to:
            values[name] = max(0.0, log) * base.up_to[name]
        else:
            values[name] = min(math.exp(log), 1.0) if name.endswith("_share") else math.exp(log)
    return replace(base, parameters=StepParameters(**values), host_factors=hosts)


def _same_version(one: str, other: str) -> bool:
    """Whether one version is a prefix of the other: 0.12 of v0.12.0, not 0.1 of 0.12.

    `other` may be a range, such as `0.12 to 0.19`, with versions of two parts.
    """
    first, _, last = other.partition(" to ")
    own, low, high = (text.strip().lower().removeprefix("v").split(".") for text in (one, first, last))
    if last and all(part.isdecimal() for part in (*own[:2], *low, *high)):
        return [*map(int, low)] <= [*map(int, own[:2])] <= [*map(int, high)]
    return all(left == right for left, right in zip(own, low, strict=False))


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """A profile as a key of caches: equal to all profiles with an equal `key`."""

    key: tuple[object, ...]
    profile: EngineProfile = field(compare=False)


def profile_to_json(profile: EngineProfile) -> str:
    """The profile as a JSON document that `profile_from_json` reads back unchanged."""
    document = {"schema": PROFILE_SCHEMA, **asdict(replace(profile, levels=()))}
    document["levels"] = [cell_to_json(cell) for cell in profile.levels]
    document["fitted_cells"] = " ".join(profile.fitted_cells)
    for name in ("capture", "host_cache_bytes", "host_bytes_per_s"):
        if not document[name]:
            del document[name]
    return json.dumps(document, indent=2) + "\n"


def profile_from_json(text: str) -> EngineProfile:
    """Read a saved profile; raises InputError where it is not one."""
    try:
        document: dict[str, Any] = orjson.loads(text)  # without NaN and boundless integers
        schema = document.pop("schema")
        if schema != PROFILE_SCHEMA:
            raise InputError(
                f"the profile has schema {schema}; this version reads {PROFILE_SCHEMA}: "
                "make it again with `lmi-bench calibrate`"
            )
        return profile_from_document(document)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(f"not an engine profile: {exc}") from exc


def profile_from_document(document: Mapping[str, Any]) -> EngineProfile:
    """The profile in a decoded document; raises ValueError, KeyError or TypeError for another."""
    values: dict[str, Any] = {"accelerators": (), "vendors": ()}
    values |= {name: _as_tuple(value) for name, value in document.items()}
    check_types(StepParameters, values["parameters"], "parameters")
    for shares in (values["parameters"], values["log_sd"]):  # one share for both in older files
        if "narrow_share" in shares:
            shares.setdefault("narrow_read_share", shares["narrow_share"])
    values["parameters"] = StepParameters(**values["parameters"])
    values["kv_layout"] = KvLayout(values["kv_layout"])
    values["fitted_cells"] = tuple(values.get("fitted_cells", "").split())
    if values.get("machine") is not None:
        values["machine"] = MeasuredMachine(**values["machine"])
    values["levels"] = tuple(cell_from_json(each, values.get("machine")) for each in values.get("levels", ()))
    check_types(EngineProfile, values, "the profile")
    return EngineProfile(**values)


def _as_tuple(value: Any) -> Any:
    """A list, with the lists in it, as a tuple; anything else as it is."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


WHOLE_PROMPTS: Final = "vllm 0.4"
SMALL_CHUNKS: Final = "vllm 0.5.4"
CHUNKS: Final = "vllm 0.6.5"
V1: Final = "vllm 0.8"
SGLANG: Final = "sglang"

_LONG_CONTEXT = 32_768
_LEAST_STEP_TOKENS = 2048
_CHUNK_TOKENS = {SMALL_CHUNKS: 512, CHUNKS: 2048}
_LARGE_BYTES: Final = 70 * GIB
_V1_LARGE, _V1_SMALL = (8192, 1024), (2048, 256)
_SGLANG_TOKENS: Final = ((35 * GIB, 2048), (60 * GIB, 4096))


def vllm_defaults(version: tuple[int, ...]) -> str:
    """The rule of a version before 0.8, such as (0, 6, 3)."""
    if version >= (0, 6, 5):
        return CHUNKS
    return SMALL_CHUNKS if version >= (0, 5, 4) else WHOLE_PROMPTS


def as_set(
    profile: EngineProfile, shape: ModelShape, device: Accelerator, cache_tokens: float = math.inf
) -> EngineProfile:
    """The profile with its scheduler settings for that model on that device.

    cache_tokens  tokens that the copy's cache holds: an engine does not start with a longer context

    A profile without a rule (`defaults` is empty, as in the result) stays as it is. The settings of
    V1 and SGLang are upper bounds: lower values of the profile stay.
    """
    rule = profile.defaults
    if not rule:
        return profile
    if rule in (V1, SGLANG):
        tokens, batch = _V1_SMALL
        if rule == SGLANG:
            fitting = (most for below, most in _SGLANG_TOKENS if device.memory_bytes < below)
            tokens, batch = next(fitting, _V1_LARGE[0]), profile.max_batch_size
        elif device.memory_bytes >= _LARGE_BYTES and not device.name.startswith("A100"):
            tokens, batch = _V1_LARGE
        return replace(
            profile,
            max_prefill_tokens=min(tokens, profile.max_prefill_tokens),
            max_batch_size=min(batch, profile.max_batch_size),
            defaults="",
        )
    context = int(min(cache_tokens, shape.max_positions))
    chunk = _CHUNK_TOKENS.get(rule)
    if chunk and context > _LONG_CONTEXT and shape.sliding_window is None:
        return replace(profile, chunked_prefill=True, max_prefill_tokens=chunk, defaults="")
    whole = max(_LEAST_STEP_TOKENS, context)
    return replace(profile, chunked_prefill=False, max_prefill_tokens=whole, defaults="")


_PER_LAYER: Final = ("gap_per_layer_s", "host_per_layer_s")
_OTHER_KERNELS: Final = 0.5
"""Standard deviation of the logarithm of a layer's times. Fits of one engine differ by a factor of
1.3 in the gap of a layer between two tables on H100, and of 3 between MI300X and MI355X."""


def carried(profile: EngineProfile, setups: Iterable[Setup]) -> EngineProfile:
    """The profile with the doubts that these set-ups add to its parameters."""
    added: dict[str, float] = {}
    for setup in setups:
        device, link = setup.instance.accelerator, setup.instance.link
        known = generations(profile)  # none: it was not fitted
        is_new = bool(known) and generation(device) not in known
        if is_new or _first_mixture(profile, setup):
            added |= dict.fromkeys(_PER_LAYER, _OTHER_KERNELS)
        if setup.tensor_parallel > 1 and link.kind == "pcie" and link.is_shared is None:
            # a shared bridge carries tp times the bytes: half of that factor either way
            doubt = math.log(setup.tensor_parallel) / 2
            added["pcie_share"] = max(doubt, added.get("pcie_share", 0.0))
    if not added:
        return profile
    wider = {name: math.hypot(profile.log_sd[name], sd) for name, sd in added.items() if profile.log_sd.get(name)}
    return replace(profile, log_sd={**profile.log_sd, **wider})


def generations(profile: EngineProfile) -> frozenset[tuple[str, int, bool]]:
    """Of the devices that the profile was fitted to; empty for a prior or a processor."""
    names = filter(is_accelerator, profile.accelerators)
    return frozenset(generation(find_accelerator(name)) for name in names)


def generation(device: Accelerator) -> tuple[str, int, bool]:
    """Vendor, CUDA's major capability, and whether it has FP4 units (AMD states no capability)."""
    capability = int(device.compute_capability or 0)
    return device.vendor, capability, device.float4_flop_per_s is not None


def _first_mixture(profile: EngineProfile, setup: Setup) -> bool:
    """Whether the model is a mixture, and the profile was fitted to none."""
    if not setup.shape.is_moe or not profile.models:
        return False
    try:
        return not any(find_model(name).is_moe for name in profile.models)
    except InputError:
        return False
