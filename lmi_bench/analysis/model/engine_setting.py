"""Engine settings as candidates of a plan; None leaves a value as it is.

Number formats change bytes and cache, not the answers; CUDA graphs the launch time of a step, which
is then the matching prior's.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, GRAPH_GPU_PRIOR
from lmi_bench.analysis.model.memory import kv_bytes_per_value, weight_format
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Parallelism, Speculation, network_bytes_per_s
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape

MOST_SETTINGS: Final = 64
"""Limit on the settings of one request: each is screened on every machine."""

SPLITTING_ENGINES: Final = ("vllm", "sglang", "tensorrt-llm")
"""Engines that spread experts over devices, in lower case."""

_LAUNCH = "host_per_layer_s"
_GRAPHS_BELOW_S = 50e-6  # a longer launch of a layer launches each kernel by itself
_FULL_BITS = 16


def _choice(text: Callable[[Any], str], flag: str = "") -> Any:
    """A field whose value is shown as `text` gives it; flag: of a number of at least 1."""
    return field(default=None, metadata={"text": text, "flag": flag})


_OF_A_SPLIT: Final = ("expert_parallel", "dp_attention", "pipeline", "hosts")
_OF_A_PROFILE: Final = ("max_batch_size", "max_prefill_tokens", "chunked_prefill", "memory_share")


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """One way to set an engine; None: as the workload or the profile says.

    dtype, kv_dtype     number formats of the weights and of the cache
    max_batch_size      sequences that run together
    max_prefill_tokens  prompt tokens of one step; with chunked prefill the size of a chunk
    memory_share        share of a device's memory, 0 to 1
    copies              copies of the model on one machine; None: as many as its devices hold
    expert_parallel     whole experts on each device of a copy
    dp_attention        each device with the attention and cache of its own sequences
    pipeline            pipeline stages, of as many devices each as the tensor-parallel degree
    hosts               machines that one copy spans
    """

    dtype: str | None = _choice(str)
    kv_dtype: str | None = _choice("{} cache".format)
    speculation: Speculation | None = _choice(lambda used: f"draft {used.draft_name}")  # noqa: RUF009
    max_batch_size: int | None = _choice("batch {}".format, "--max-batch")
    max_prefill_tokens: int | None = _choice("prefill {}".format, "--prefill-tokens")
    chunked_prefill: bool | None = _choice(lambda on: "chunked" if on else "whole prompts")
    memory_share: float | None = _choice("memory {:.0%}".format)
    cuda_graphs: bool | None = _choice(lambda on: "graphs" if on else "no graphs")
    copies: int | None = _choice(lambda n: "1 copy" if n == 1 else f"{n} copies", "--replicas")
    expert_parallel: bool | None = _choice(lambda on: "EP" if on else "no EP")
    dp_attention: bool | None = _choice(lambda on: "DP attention" if on else "no DP attention")
    pipeline: int | None = _choice("PP {}".format, "--pp")
    hosts: int | None = _choice("{} hosts a copy".format, "--hosts")

    def __post_init__(self) -> None:
        for item in fields(self):
            flag, count = item.metadata["flag"], getattr(self, item.name)
            if flag and count is not None and count < 1:
                raise InputError(f"{flag} must be at least 1, got {count}")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise InputError(f"--memory-share must be above 0 and at most 1, got {self.memory_share:g}")
        if self.dtype is not None:
            weight_format(self.dtype)
        if self.kv_dtype is not None:
            kv_bytes_per_value("float16", self.kv_dtype)

    @property
    def of_a_copy(self) -> "EngineSetting":
        """The setting without the number of copies, which does not affect one copy."""
        return replace(self, copies=None)

    @property
    def of_a_step(self) -> "EngineSetting":
        """The part of the setting that determines the time of a given step."""
        return replace(self.of_a_copy, **dict.fromkeys(_OF_A_PROFILE))

    def parallelism(self, instance: Instance, tensor_parallel: int) -> Parallelism:
        """The split of a copy over so many devices a stage, on as many machines as stated."""
        hosts = self.hosts or 1
        return Parallelism(
            expert_parallel=bool(self.expert_parallel),
            attention_groups=tensor_parallel if self.dp_attention else 1,
            pipeline=self.pipeline or 1,
            hosts=hosts,
            network_bytes_per_s=network_bytes_per_s(instance, hosts),
        )

    def profile(self, base: EngineProfile) -> EngineProfile:
        """The engine's profile under this setting."""
        own: dict[str, Any] = {name: getattr(self, name) for name in _OF_A_PROFILE}
        changed = replace(base, **{key: value for key, value in own.items() if value is not None})
        if self.cuda_graphs is None or self.cuda_graphs == has_graphs(base):
            return changed
        prior = GRAPH_GPU_PRIOR if self.cuda_graphs else EAGER_GPU_PRIOR
        launch_s = getattr(prior.parameters, _LAUNCH)
        return replace(
            changed,
            parameters=replace(changed.parameters, host_per_layer_s=launch_s),
            log_sd={**changed.log_sd, _LAUNCH: prior.log_sd[_LAUNCH]},
            log_correlation=(),
        )

    def describe(self) -> str:
        """The differences, for display; empty where there are none.

        >>> EngineSetting(dtype="int4", max_batch_size=64).describe()
        'int4, batch 64'
        """
        values = ((item.metadata["text"], getattr(self, item.name)) for item in fields(self))
        return ", ".join(text(value) for text, value in values if value is not None)

    @property
    def split(self) -> str:
        """How a copy is split beyond tensor parallelism, for display; empty if it is not."""
        own = EngineSetting(**{name: getattr(self, name) or None for name in _OF_A_SPLIT})
        return own.describe()

    def caveats(self) -> Iterator[str]:
        """Effects of this setting that the plan does not model."""
        narrow = []
        if self.dtype is not None and weight_format(self.dtype).bits < _FULL_BITS:
            narrow.append(self.dtype)
        if self.kv_dtype is not None and kv_bytes_per_value("float16", self.kv_dtype) < 2:
            narrow.append(f"{self.kv_dtype} cache")
        if narrow:
            yield (
                f"{' and '.join(narrow)}: the plan has bytes and speed, not the effect of rounding "
                "on the answers: score them (lmi-bench optimize) before you buy"
            )
        if self.cuda_graphs is not None:
            yield (
                f"{'graphs' if self.cuda_graphs else 'no graphs'}: the launch time is another "
                "engine's, not the profile's: measure it"
            )
        if self.split:
            yield (
                f"{self.split}: priced from sizes and data sheets; no level of this profile was "
                "measured so: measure one before you buy"
            )
        if self.speculation is not None:
            yield (
                f"speculation: planned with the stated acceptance of "
                f"{self.speculation.acceptance:.2f}; the real one depends on the text"
            )

    def to_json(self) -> dict[str, Any]:
        """The differences; None: as in the question or the profile."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["replicas"] = values.pop("copies")
        for name in _OF_A_SPLIT:  # only of copies that are split so
            if values[name] is None:
                del values[name]
        speculation = None if self.speculation is None else self.speculation.to_json()
        return {**values, "speculation": speculation}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "EngineSetting":
        """Inverse of `to_json`; raises InputError for an unknown draft, KeyError or TypeError."""
        values = {**content, "copies": content["replicas"]}
        del values["replicas"]
        if values["speculation"] is not None:
            values["speculation"] = Speculation.from_json(values["speculation"])
        return cls(**values)


AS_STATED: Final = EngineSetting()
"""The workload and the profile as they are."""


def has_graphs(profile: EngineProfile) -> bool:
    """Whether the profile's launch times are those of CUDA graphs."""
    return profile.parameters.host_per_layer_s < _GRAPHS_BELOW_S


def settings_of(
    axes: Mapping[str, Iterable[Any]], *, dtype: str, profile: EngineProfile, shape: ModelShape | None = None
) -> tuple[EngineSetting, ...]:
    """Every combination once; a value equal to the workload's or the profile's becomes None.

    axes   values to choose from, by the field of `EngineSetting`; without any: as it is
    dtype  number format of the workload's weights
    shape  of the model: a mixture of experts is also split by experts and attention, where the
           engine does that and the axes do not say

    Raises InputError for more than MOST_SETTINGS combinations or an impossible value.
    """
    applies: dict[str, Any] = {
        "dtype": weight_format(dtype).name,
        "memory_share": profile.memory_share,
        "cuda_graphs": has_graphs(profile),
        "expert_parallel": False,
        "dp_attention": False,
        "pipeline": 1,
        "hosts": 1,
    }
    if profile.defaults == "":  # else a device may have less than the profile says
        applies |= {name: getattr(profile, name) for name in _OF_A_PROFILE}
    usual = kv_bytes_per_value(dtype)  # that engines choose with such weights
    named: dict[str, Callable[[Any], Any]] = {
        "dtype": lambda name: weight_format(name).name,
        "kv_dtype": lambda name: None if kv_bytes_per_value(dtype, name) == usual else name.strip().lower(),
    }
    names = [item.name for item in fields(EngineSetting)]
    columns = []
    for name in names:
        values = [named[name](each) if name in named else each for each in axes.get(name, ())]
        own = [None if each == applies.get(name) else each for each in values]
        columns.append(list(dict.fromkeys(own)) or [None])
    found = dict.fromkeys(EngineSetting(*values) for values in itertools.product(*columns))
    stated = axes.get("expert_parallel") or axes.get("dp_attention")
    engine = profile.name.lower()
    if shape is not None and shape.is_moe and not stated and engine in SPLITTING_ENGINES:
        more = [replace(each, expert_parallel=True) for each in found]
        if shape.latent_kv_dim:
            more += [replace(each, dp_attention=True) for each in more]
        if len(found) + len(more) <= MOST_SETTINGS:
            found |= dict.fromkeys(more)
    if len(found) > MOST_SETTINGS:
        raise InputError(
            f"{len(found)} combinations of engine settings, more than {MOST_SETTINGS}: give "
            "fewer values of --dtype, --kv-dtype, --max-batch, --prefill-tokens, "
            "--chunked-prefill, --memory-share, --graphs, --replicas, --ep, --dp-attention, "
            "--pp or --hosts"
        )
    return tuple(found)
