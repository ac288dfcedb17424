"""What a sweep is asked to do: the scenario file, checked whole.

A scenario is YAML; every field has a default, every mistake is reported at once, and an unknown
field names the nearest known one. The canonical form (all fields, defaults filled in) is hashed,
so that a run is only ever resumed with the scenario that began it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from lmi_bench.errors import InputError
from lmi_bench.lengths import parse_lengths
from lmi_bench.slo import parse_slo

DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32)
DEFAULT_OPEN_LOOP_REQUESTS = 100
"""Requests of an open-loop level that names neither a number nor a duration."""

AUTO = "auto"
DEFAULT_MODEL = "demo-15m"
SAGEMAKER_PREFIX = "sagemaker:"
DEFAULT_TIMEOUT_S = 60.0
SAGEMAKER_STREAMING_TIMEOUT_S = 480.0
"""How long SageMaker lets a response stream take; without one it gives up after 60 s."""
_DERIVED = ("model", "timeout_s")
"""Fields whose default depends on the others."""

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _as_list(value: object) -> object:
    """One level may be written without brackets."""
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def _levels_or_auto(value: object) -> object:
    """Levels as a list, or the word auto."""
    if isinstance(value, str) and value != "auto":
        raise ValueError("write levels such as [1, 2, 4], or auto")
    return _as_list(value)


def _raise_value_error(parse: Callable[[str], object], text: str) -> None:
    """Check a text with its parser; pydantic gathers ValueErrors only."""
    try:
        parse(text)
    except InputError as exc:
        raise ValueError(str(exc)) from exc


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class LengthShare(_Section):
    """One kind of request of a mixed workload; lengths in tokens, `share` relative to the rest."""

    input_tokens: PositiveInt
    output_tokens: PositiveInt
    share: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class WorkloadSection(_Section):
    """What is asked, in tokens.

    mix            several kinds of request at once; `input_tokens`, `output_tokens` then unused
    dataset        JSON lines with `prompt` (or `text`) and, if wanted, `output_tokens`; a relative
                   path counts from the scenario file
    input_lengths  a distribution, such as normal(622,100) or uniform(500,1000), instead of
                   input_tokens; likewise output_lengths
    trace          recorded traffic: its lengths and, in an open loop, its times
    ignore_eos     generate the asked number of tokens whatever the model says
    reuse_prompts  send the same prompts in every run, which flatters a server's prefix cache
    """

    input_tokens: PositiveInt = 256
    output_tokens: PositiveInt = 256
    mix: tuple[LengthShare, ...] = ()
    dataset: str | None = None
    input_lengths: str | None = None
    output_lengths: str | None = None
    trace: str | None = None
    ignore_eos: bool = True
    reuse_prompts: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSection:
        drawn = self.input_lengths is not None or self.output_lengths is not None
        given = {
            "mix": bool(self.mix),
            "dataset": self.dataset is not None,
            "input_lengths or output_lengths": drawn,
            "trace": self.trace is not None,
        }
        named = [name for name, there in given.items() if there]
        if len(named) > 1:
            raise ValueError(f"give either {' or '.join(named)}, not both")
        for text in (self.input_lengths, self.output_lengths):
            if text is not None:
                _raise_value_error(parse_lengths, text)
        return self


class LoadSection(_Section):
    """How much at once: users that wait (concurrency), or arrivals that do not (rate_per_s).

    concurrency         levels, or auto: doubling until the server is full, finer round the knee
    search              find the highest concurrency or rate that meets the SLOs; one value of
                        `concurrency` or `rate_per_s` is then where it starts
    burstiness          of gamma arrivals: 1 is Poisson, below it they come in bursts
    ramp_s              an open loop's rate rises from 0 over the first seconds of a level
    speed               of a trace: a level for each, 1 as recorded, 2 twice as fast
    repeat              how often each level runs; with `until` at least
    until               repeat until a metric is known well enough: `ttft_p90 +-5%`
    requests_per_user   closed loop: a level sends concurrency times this many
    requests_per_level  requests of every level instead
    duration_s          a level hands out nothing after this long; with requests_per_level,
                        whichever comes first
    warmup_requests     sent before each level and left out of it
    """

    concurrency: Annotated[
        tuple[PositiveInt, ...] | Literal["auto"] | None, BeforeValidator(_levels_or_auto)
    ] = None
    rate_per_s: Annotated[tuple[PositiveRate, ...] | None, BeforeValidator(_as_list)] = None
    search: Literal["concurrency", "rate"] | None = None
    arrivals: Literal["constant", "poisson", "gamma"] = "poisson"
    burstiness: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    ramp_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    speed: Annotated[tuple[PositiveRate, ...], BeforeValidator(_as_list)] = (1.0,)
    repeat: PositiveInt = 1
    until: str | None = None
    requests_per_user: PositiveInt = 3
    requests_per_level: PositiveInt | None = None
    duration_s: PositiveSeconds | None = None
    warmup_requests: Annotated[int, Field(ge=0)] = 1

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> LoadSection:
        if self.concurrency is not None and self.rate_per_s is not None:
            raise ValueError("give either concurrency or rate_per_s, not both")
        for name in ("concurrency", "rate_per_s"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} has no level; write for example [1, 2, 4]")
        if self.search is not None:
            self._check_search(self.search)
        if self.is_adaptive and (self.repeat > 1 or self.until is not None):
            raise ValueError("repeat and until need listed levels, not auto or a search")
        return self

    def _check_search(self, over: str) -> None:
        start = self.concurrency if over == "concurrency" else self.rate_per_s
        other = self.rate_per_s if over == "concurrency" else self.concurrency
        if other is not None:
            raise ValueError(f"search over {over} picks its own levels; leave the others out")
        if isinstance(start, tuple) and len(start) > 1:
            raise ValueError(f"search over {over} takes one value to start from, got {len(start)}")

    @property
    def is_adaptive(self) -> bool:
        """Whether a rule picks the levels from those before."""
        return self.search is not None or self.concurrency == "auto"

    @property
    def concurrency_levels(self) -> tuple[int, ...]:
        """Levels of the closed loop; empty when the load is a rate or found as the sweep goes."""
        if self.rate_per_s is not None or self.search is not None or self.concurrency == "auto":
            return ()
        return DEFAULT_CONCURRENCY if self.concurrency is None else self.concurrency


class EngineSection(_Section):
    """Settings of the bundled and of the simulated engine; an endpoint keeps its own.

    None leaves a setting to the engine: the bundled one has its defaults, a simulated one those
    of its profile; blocks and lengths follow from memory and model. The run's manifest records
    what came of it.

    max_input_tokens  longest prompt; max_batch_total_tokens: tokens that the KV cache may hold
    quantize          the bundled engine's weights, rounded as they are loaded
    smoothquant_alpha how much of the activations' outliers moves into the weights;
                      smoothquant_per_token, smoothquant_per_channel: scales of activations by
                      row, of weights by output, instead of one for all
    calibration       a text file that awq and smoothquant look at; by default a short text that
                      comes with the engine
    draft             speculative decoding: `ngram`, or a smaller model with the same vocabulary;
                      draft_tokens of it are verified in one step
    draft_acceptance  of a simulated engine, which cannot find out: the chance (0 to 1) with which
                      each drafted token holds
    """

    policy: Literal["none", "dynamic", "rolling"] = "rolling"
    kv_layout: Literal["paged", "contiguous"] | None = None
    batch_size: PositiveInt = 4
    max_batch_delay_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 100.0
    max_rolling_batch_size: PositiveInt | None = None
    max_rolling_batch_prefill_tokens: PositiveInt | None = None
    chunked_prefill: bool | None = None
    max_concurrent_requests: PositiveInt | None = None
    prefix_caching: bool | None = None
    max_input_tokens: PositiveInt | None = None
    max_batch_total_tokens: PositiveInt | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    kv_dtype: Literal["float32", "bfloat16"] | None = None
    tensor_parallel: PositiveInt | Literal["max"] = 1
    replicas: PositiveInt = 1
    router: Literal["round_robin", "least_outstanding", "random"] = "round_robin"
    num_blocks: PositiveInt | None = None
    block_size: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    threads: PositiveInt | None = None
    quantize: Literal["none", "int8", "awq", "awq-int4", "awq-int3", "smoothquant", "fp8"] = "none"
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1)] = 0.8
    smoothquant_per_token: bool = True
    smoothquant_per_channel: bool = True
    calibration: str | None = None
    draft: Annotated[str, Field(min_length=1)] | None = None
    draft_tokens: PositiveInt = 4
    draft_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    profile: str | None = None


class SageMakerSection(_Section):
    """Which part of a SageMaker endpoint, and where its runtime is if not at AWS."""

    endpoint_url: str | None = None
    inference_component: str | None = None
    target_variant: str | None = None
    custom_attributes: str | None = None


def is_endpoint(target: str) -> bool:
    """Whether the target is a server somewhere: a URL or `sagemaker:NAME`."""
    return "://" in target or target.startswith(SAGEMAKER_PREFIX)


def _default_model(fields: dict[str, Any]) -> str:
    return AUTO if is_endpoint(fields.get("target", "")) else DEFAULT_MODEL


def _default_timeout_s(fields: dict[str, Any]) -> float:
    streamed_by_sagemaker = fields.get("stream", True) and str(fields.get("target", "")).startswith(
        SAGEMAKER_PREFIX
    )
    return SAGEMAKER_STREAMING_TIMEOUT_S if streamed_by_sagemaker else DEFAULT_TIMEOUT_S


class ClientSection(_Section):
    """How the load generator sends to an endpoint and takes its times.

    timestamps  kernel: the kernel's receive time; user: the read's; None: the kernel's where the
                host has it
    retries     aws-standard: as AWS's SDKs do, three attempts, counted, latency from the first
    """

    timestamps: Literal["kernel", "user"] | None = None
    retries: Literal["aws-standard"] | None = None


class Scenario(_Section):
    """A whole sweep.

    target     `engine` (bundled, in this process), `sim:INSTANCE`, a URL, or `sagemaker:NAME`
    model      a catalog name, a folder, or the name that the endpoint knows; auto: what it serves
    protocol   wire format of an endpoint; auto: found by asking it
    stream     False asks an endpoint for whole answers: their total time alone is known
    timeout_s  of one request; by default 60, and 480 for a stream from SageMaker
    """

    name: str = ""
    target: Annotated[str, Field(min_length=1)] = "engine"
    model: Annotated[str, Field(min_length=1, default_factory=_default_model)]
    protocol: Literal["auto", "openai", "openai-chat", "lmi", "tgi"] = "auto"
    stream: bool = True
    sagemaker: SageMakerSection = SageMakerSection()
    workload: WorkloadSection = WorkloadSection()
    load: LoadSection = LoadSection()
    client: ClientSection = ClientSection()
    engine: EngineSection = EngineSection()
    timeout_s: PositiveSeconds | None = Field(default_factory=_default_timeout_s)
    seed: int = 0
    slo: tuple[str, ...] = ()

    @field_validator("slo", mode="before")
    @classmethod
    def _one_slo_without_brackets(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("slo")
    @classmethod
    def _slo_is_understood(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                parse_slo(text)
            except InputError as exc:
                raise ValueError(str(exc)) from exc
        return value

    @model_validator(mode="after")
    def _a_search_has_a_limit(self) -> Scenario:
        if self.load.search is not None and not self.slo:
            raise ValueError(
                f"a search over {self.load.search} needs an SLO (slo, --slo), such as ttft_p90<=1s"
            )
        return self

    @model_validator(mode="after")
    def _a_trace_has_its_own_times(self) -> Scenario:
        if self.workload.trace is not None and self.load.search == "rate":
            raise ValueError("a search over rates makes its own arrivals; leave the trace out")
        if self.workload.trace is None and self.load.speed != (1.0,):
            raise ValueError("speed is that of a trace; give a trace, or a rate instead")
        return self

    def canonical(self) -> dict[str, Any]:
        """All fields with their defaults filled in, as plain JSON values."""
        return self.model_dump(mode="json")

    def hash(self) -> str:
        """SHA-256 of what decides the measurement: names and SLOs may change, the rest may not.

        SLOs count where they pick the levels, a data set with its bytes. Raises InputError when it
        cannot be read.
        """
        content = self.canonical()
        for free in ("name",) if self.load.is_adaptive else ("name", "slo"):
            del content[free]
        for name in ("dataset", "trace"):
            path = content["workload"][name]
            if path is not None:
                digest = hashlib.sha256(_read_bytes(Path(path))).hexdigest()
                content["workload"][name] = digest
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_overrides(self, overrides: Mapping[str, Any]) -> Scenario:
        """A scenario with some fields replaced, checked again as a whole.

        Keys are dotted (`load.concurrency`); a value of None leaves the field alone. A rate
        replaces a concurrency and the other way round; a length replaces a mix, a distribution
        and a trace.
        """
        content = self.model_dump()
        for name in _DERIVED:
            if name not in self.model_fields_set:
                del content[name]
        for dotted, value in overrides.items():
            if value is None:
                continue
            *sections, last = dotted.split(".")
            place = content
            for section in sections:
                place = place.setdefault(section, {})
            if dotted == "load.concurrency":
                content["load"]["rate_per_s"] = None
            elif dotted == "load.rate_per_s":
                content["load"]["concurrency"] = None
            elif dotted in ("workload.input_tokens", "workload.output_tokens"):
                content["workload"]["mix"] = ()
                content["workload"][dotted.split(".")[1].replace("tokens", "lengths")] = None
                content["workload"]["trace"] = None
            place[last] = value
        return parse_scenario(content)


def parse_scenario(content: object, *, source: str = "scenario") -> Scenario:
    """A scenario from plain values; raises InputError that lists every mistake."""
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise InputError(f"{source}: expected fields such as `model: demo-15m`, got {content!r}")
    try:
        return Scenario.model_validate(content)
    except ValidationError as exc:
        lines = [_describe(dict(error)) for error in exc.errors() if not _follows(error)]
        noun = "mistake" if len(lines) == 1 else "mistakes"
        raise InputError(
            f"{source}: {len(lines)} {noun}\n" + "\n".join(f"  {line}" for line in lines)
        ) from exc


def _follows(error: Mapping[str, Any]) -> bool:
    """Whether a mistake only follows from another that is reported.

    `auto` is the other branch of a list of levels; a default that depends on other fields waits
    for them to be right.
    """
    if error["type"] == "default_factory_not_called":
        return True
    return error["type"] == "literal_error" and "literal['auto']" in error["loc"]


def load_scenario(path: Path) -> Scenario:
    """Read and check a scenario file; raises InputError when it cannot be used."""
    try:
        content = yaml.safe_load(_read_bytes(path).decode())
    except UnicodeDecodeError as exc:
        raise InputError(f"{path}: not UTF-8 text (byte {exc.start})") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path}: not YAML: {' '.join(str(exc).split())}") from exc
    scenario = parse_scenario(content, source=str(path))
    relative = {
        f"workload.{name}": str(path.parent / given)
        for name in ("dataset", "trace")
        if (given := getattr(scenario.workload, name)) is not None and not Path(given).is_absolute()
    }
    return scenario.with_overrides(relative) if relative else scenario


def scenario_json_schema() -> dict[str, Any]:
    """The JSON schema of a scenario file, for editors."""
    return Scenario.model_json_schema()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}") from exc


def _describe(error: Mapping[str, Any]) -> str:
    """One mistake in one line: where, what was given, what to write."""
    where = ".".join(str(part) for part in error["loc"] if not str(part).startswith("tuple["))
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown field{_nearest(error['loc'])}"
    message = str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    if isinstance(given, str | int | float):
        message += f", got {given!r}"
    return f"{where}: {message}" if where else message


def _nearest(location: Sequence[str | int]) -> str:
    """What an unknown field probably meant, as the end of a sentence."""
    section: type[BaseModel] | None = Scenario
    for part in location[:-1]:
        if isinstance(part, str):
            section = _section_of(section, part)
    unknown = str(location[-1])
    here = list(section.model_fields) if section else []
    close = difflib.get_close_matches(unknown, here, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    elsewhere = {
        field: f"{name}.{field}" if name else field
        for name, fields in _all_fields().items()
        for field in fields
    }
    close = difflib.get_close_matches(unknown, elsewhere, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {elsewhere[close[0]]}?"
    return f"; known here: {', '.join(sorted(here))}"


def _section_of(section: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    if section is None or name not in section.model_fields:
        return None
    annotation = section.model_fields[name].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_fields() -> dict[str, list[str]]:
    sections = {"": list(Scenario.model_fields)}
    for name in Scenario.model_fields:
        section = _section_of(Scenario, name)
        if section is not None:
            sections[name] = list(section.model_fields)
    return sections
