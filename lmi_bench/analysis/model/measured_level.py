"""Measured levels of equal requests, and their JSON in a profile's file."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from lmi_bench.analysis.model.local_machine import LOCAL_NAME, MeasuredMachine
from lmi_bench.analysis.model.setup import Parallelism, PrefillPool, Setup, Speculation
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import Instance, bare_machine, find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.models.shape import ModelShape

Metric = Literal[
    "throughput_tokens_per_s", "latency_p90_s_per_token", "latency_mean_s_per_token", "ttft_mean_s", "tpot_mean_s"
]
MEASURED: tuple[Metric, ...] = get_args(Metric)

LENGTH_SPREAD = 0.1
"""Relative variation of output lengths that are drawn, or of answers that end by themselves."""
_MOST_USERS, _MOST_CONTEXTS = 100_000, 8  # a server may extend a context by RoPE scaling
_WITHOUT_JSON = ("shape", "instance", "setup", "prefill")
_OF_SETUP = ("tensor_parallel", "dtype", "kv_dtype", "speculation", "parallelism", "host_copies")


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    """One measured level of equal requests; None is not measured.

    setup                        set-up of one copy
    replicas                     copies that share the load evenly
    prefill                      workers that compute the prompts; the copies only decode
    max_sequences                largest number of sequences that ran together, if known
    latency_*_s_per_token        end-to-end time / output tokens: 90th percentile, mean
    ttft_mean_s, tpot_mean_s     time to the first token, and of each later one
    latency_rounded_down_s       unit that the published latency was rounded down to, 0 for none
    length_spread                relative variation of output lengths around output_tokens
    lengths_stated               the source states that variation: no fit may doubt it
    medians                      ttft_mean_s and tpot_mean_s are medians over the requests, of
                                 sources that state no means
    throughput_by_latency        throughput is users * output / mean end-to-end time, not tokens
                                 over wall time
    cached_tokens                tokens of each prompt that the prefix cache holds
    poll_steps                   decode steps between a busy engine's looks at new requests
    gather_steps, gather_prompts a prompt waits until so many have come, at most so many steps
    arrivals_s                   due times of the open loop's requests, if known
    measured_day                 day of the measurement (an ordinal), where a table has many:
                                 engines change within weeks
    start_left_out               latencies leave out the first request of each user of a closed
                                 loop, as this program's runs do; published tables count all
    """

    setup: Setup
    input_tokens: int
    output_tokens: int
    load: Load
    num_requests: int
    throughput_tokens_per_s: float | None = None
    latency_p90_s_per_token: float | None = None
    latency_mean_s_per_token: float | None = None
    ttft_mean_s: float | None = None
    tpot_mean_s: float | None = None
    replicas: int = 1
    max_sequences: int | None = None
    latency_rounded_down_s: float = 0.0
    length_spread: float = 0.0
    lengths_stated: bool = False
    medians: bool = False
    throughput_by_latency: bool = False
    cached_tokens: int = 0
    poll_steps: int = 0
    gather_steps: int = 0
    gather_prompts: int = 1
    arrivals_s: tuple[float, ...] = ()
    start_left_out: bool = False
    prefill: PrefillPool | None = None
    measured_day: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens < self.input_tokens:
            raise InputError(
                f"a prompt of {self.input_tokens} tokens cannot have {self.cached_tokens} of them "
                "in the prefix cache: its last one is always computed"
            )
        for name in MEASURED:
            value: float | None = getattr(self, name)
            if value is not None and not 1e-12 < value < 1e12:
                raise InputError(f"a level's {name} must be above 0 and below 1e12, got {value:g}")
        context, tokens = self.setup.shape.max_positions, self.input_tokens + self.output_tokens
        if tokens > _MOST_CONTEXTS * context or self.concurrency > _MOST_USERS:
            raise InputError(
                f"a level of {self.concurrency:,} users and {tokens:,} tokens a request is not "
                f"planned: at most {_MOST_USERS:,}, and {_MOST_CONTEXTS} contexts of {context:,}"
            )

    @property
    def concurrency(self) -> int:
        """Users of a closed loop; 0 in an open loop."""
        return self.load.concurrency or 0

    @property
    def rate_per_s(self) -> float | None:
        """Requests each second of an open loop; None in a closed loop."""
        return self.load.rate_per_s

    @property
    def extent(self) -> tuple[int, ...]:
        """Prompt and answer in tokens, and users of a copy in a closed loop."""
        users = -(-self.concurrency // self.replicas)
        return (self.input_tokens, self.output_tokens, *([users] if users else []))

    def measured(self, metric: Metric) -> float | None:
        """A measured figure; half the rounding unit is added to a rounded one."""
        value: float | None = getattr(self, metric)
        if value is None or metric != "latency_p90_s_per_token":
            return value
        return value + self.latency_rounded_down_s / 2


def marks_of(cells: Iterable[MeasuredLevel]) -> frozenset[str]:
    """A mark for each figure, to recognise measured levels in any table.

    Eight hexadecimal digits of the configuration, the load and the figure to three digits.
    """
    marks = set()
    for cell in cells:
        load = (
            cell.setup.shape.name,
            cell.setup.instance.accelerator.name,
            cell.setup.tensor_parallel,
            *filter(None, [cell.setup.parallelism.label]),
            *([] if cell.prefill is None else [f"{cell.prefill.workers} prefill"]),
            cell.replicas,
            cell.input_tokens,
            cell.output_tokens,
            cell.concurrency,
            cell.rate_per_s,
        )
        for metric in MEASURED:
            value: float | None = getattr(cell, metric)
            if value is not None:
                text = "|".join(map(str, (*load, metric, f"{value:.3g}")))
                marks.add(hashlib.sha256(text.encode()).hexdigest()[:8])
    return frozenset(marks)


def cell_to_json(cell: MeasuredLevel) -> dict[str, Any]:
    """The level as plain values, without fields that have their default."""
    content: dict[str, Any] = {
        "model": {
            item.name: _plain(getattr(cell.setup.shape, item.name))
            for item in fields(ModelShape)
            if getattr(cell.setup.shape, item.name) != item.default
        },
        "machine": {
            "instance": cell.setup.instance.instance_type,
            "accelerator": cell.setup.instance.accelerator.name,
            "num_accelerators": cell.setup.instance.num_accelerators,
        },
    }
    for part in (cell.setup, cell):
        for item in fields(part):
            value = getattr(part, item.name)
            if item.name == "load":
                content["concurrency"] = cell.concurrency
            elif item.name not in _WITHOUT_JSON and value != item.default:
                content[item.name] = _plain(value)
    if cell.rate_per_s is not None:
        content["rate_per_s"] = cell.rate_per_s
    if (pool := cell.prefill) is not None:
        content["prefill"] = {
            **cell_to_json(replace(cell, setup=pool.setup, prefill=None)),
            "workers": pool.workers,
            "link_bytes_per_s": pool.link_bytes_per_s,
        }
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, Parallelism | Speculation):
        return value.to_json()
    return list(value) if isinstance(value, tuple) else value


def cell_from_json(content: Mapping[str, Any], machine: MeasuredMachine | None) -> MeasuredLevel:
    """The level that `cell_to_json` wrote.

    machine  the machine that `local` means
    Raises InputError where the level's machine is not known.
    """
    try:
        values = dict(content)
        if (pool := values.pop("prefill", None)) is not None:
            workers, link = pool["workers"], pool["link_bytes_per_s"]
            own = {key: pool[key] for key in pool if key not in ("workers", "link_bytes_per_s")}
            values["prefill"] = PrefillPool(cell_from_json(own, machine).setup, workers, link)
        model = dict(values.pop("model"))
        model["aliases"] = tuple(model.get("aliases", ()))
        where = values.pop("machine")
        values["arrivals_s"] = tuple(values.get("arrivals_s", ()))
        of_setup = {name: values.pop(name) for name in _OF_SETUP if name in values}
        if "speculation" in of_setup:
            of_setup["speculation"] = Speculation.from_json(of_setup["speculation"])
        if "parallelism" in of_setup:
            of_setup["parallelism"] = Parallelism(**of_setup["parallelism"])
        setup = Setup(ModelShape(**model), _machine(where, machine), **of_setup)
        load = Load(values.pop("concurrency") or None, values.pop("rate_per_s", None))
        return MeasuredLevel(setup, load=load, **values)
    except (KeyError, TypeError) as exc:
        raise InputError(f"not a measured level of a profile: {exc}") from exc


def _machine(where: Mapping[str, Any], machine: MeasuredMachine | None) -> Instance:
    name = str(where["instance"])
    if name == LOCAL_NAME:
        if machine is None:
            raise InputError("the profile has levels of `local` but no figures of that machine")
        return machine.instance()
    try:
        return find_instance(name)
    except InputError:
        return bare_machine(find_accelerator(str(where["accelerator"])), int(where["num_accelerators"]))
