"""The sections of a scenario file: each checks itself, `scenario` checks them together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_lengths, parse_seconds
from lmi_bench.core.sessions import parse_agents

WeightDtype = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4", "mxfp4", "nvfp4"]
DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32)

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Users = Annotated[int, Field(gt=0, le=1_000_000)]
"""Users of one level; each is an asyncio task."""


def _as_list(value: object) -> object:
    """One level may be written without brackets."""
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_text(value: object) -> object:
    """A number is a distribution with this one value."""
    return f"{value:g}" if isinstance(value, int | float) else value


def seconds_or_none(value: object) -> object:
    """Seconds, or the word none."""
    return None if value == "none" else value


def _levels_or_auto(value: object) -> object:
    """Levels as a list, or the word auto."""
    if isinstance(value, str) and value != "auto":
        raise ValueError("write levels such as [1, 2, 4], or auto")
    return _as_list(value)


def _connections(value: object) -> object:
    """The use of connections, or their number; one message for both kinds of mistake."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if value in ("reuse", "per-request"):
        return value
    raise ValueError("write reuse, per-request or a number of connections, at least 1")


def raise_value_error(parse: Callable[[str], object], text: str) -> None:
    """Check a text with its parser; pydantic gathers ValueErrors only."""
    try:
        parse(text)
    except InputError as exc:
        raise ValueError(str(exc)) from exc


def _parse_turns(text: str) -> object:
    try:
        return parse_lengths(text)
    except InputError:
        raise InputError(
            f"turns {text!r} are not understood; write a number of at least 1, or a distribution "
            "such as uniform(2,6)"
        ) from None


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class LengthShare(Section):
    """One kind of request of a mixed workload; lengths in tokens, `share` relative to the rest."""

    input_tokens: PositiveInt
    output_tokens: PositiveInt
    share: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class WorkloadSection(Section):
    """The requests, with lengths in tokens.

    mix            several kinds of request; replaces `input_tokens` and `output_tokens`
    dataset        file of JSON lines with `prompt` (or `text`) and possibly `output_tokens`; a
                   relative path is relative to the scenario file
    input_lengths  a distribution, such as normal(622,100) or uniform(500,1000), instead of
                   input_tokens; likewise output_lengths
    trace          recorded traffic: its lengths and, in an open loop, its times
    shared_prefix  tokens at the beginning of every prompt that are the same in all of them; part of
                   input_tokens, but beside what a turn of `turns` adds
    documents      COUNTxTOKENS, such as 1000x1500: behind the shared prefix each prompt has one of
                   so many documents of that length, the k-th most popular with a chance of 1/k
    turns          turns of a conversation, a number or a distribution: each prompt contains the
                   conversation so far, and input_tokens is what a turn adds
    conversations  file of recorded conversations: ShareGPT's `conversations`, or `messages`
    agents         agent sessions made up from NAME=VALUE,... (`AgentShape`); "" is its defaults
    agent_trace    recorded agent sessions: a file or folder of Weka's; idle_cap_s: longer gaps
                   between the starts of a session's requests are shortened to this
    begins_within  the first session of each user begins in its middle, with a primed cache
    think_s        seconds between an answer and the next turn, a number or a distribution
    ignore_eos     continue after the model's end of text, up to the requested number of tokens
    reuse_prompts  send the same prompts in every run, so that a server's prefix cache has them
    """

    input_tokens: PositiveInt = 256
    output_tokens: PositiveInt = 256
    mix: tuple[LengthShare, ...] = ()
    dataset: str | None = None
    input_lengths: str | None = None
    output_lengths: str | None = None
    trace: str | None = None
    shared_prefix: Annotated[int, Field(ge=0)] = 0
    documents: str | None = None
    turns: Annotated[str | None, BeforeValidator(_as_text)] = None
    conversations: str | None = None
    agents: str | None = None
    agent_trace: str | None = None
    idle_cap_s: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    begins_within: bool = False
    think_s: Annotated[str | None, BeforeValidator(_as_text)] = None
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
            "conversations": self.conversations is not None,
            "agents": self.agents is not None,
            "agent_trace": self.agent_trace is not None,
        }
        named = [name for name, there in given.items() if there]
        if len(named) > 1:
            raise ValueError(f"give either {' or '.join(named)}, not both")
        for text in (self.input_lengths, self.output_lengths):
            if text is not None:
                raise_value_error(parse_lengths, text)
        shortest = min((kind.input_tokens for kind in self.mix), default=self.input_tokens)
        if self.input_lengths is not None:
            shortest = round(parse_lengths(self.input_lengths).mean)
        if self.documents is not None:
            self._check_documents(shortest)
        if self.shared_prefix >= shortest and self.trace is None and self.turns is None:
            raise ValueError(
                f"a shared prefix of {self.shared_prefix} tokens does not fit a prompt of "
                f"{shortest}: input_tokens counts both, so give for example "
                f"{self.shared_prefix + shortest}"
            )
        return self

    def _check_documents(self, shortest: int) -> None:
        if self.dataset or self.trace or self.conversations or self.turns:
            raise ValueError("documents are a part of generated single prompts")
        if (found := self.corpus) is None:
            raise ValueError(f"documents {self.documents!r}: write COUNTxTOKENS, such as 1000x1500")
        if self.shared_prefix + found[1] >= shortest:
            raise ValueError(
                f"a shared prefix of {self.shared_prefix} tokens and a document of {found[1]} do "
                f"not fit a prompt of {shortest}: input_tokens counts both and the question"
            )

    @property
    def corpus(self) -> tuple[int, int] | None:
        """Number of documents and their tokens; None without, or if they cannot be read."""
        found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", self.documents or "")
        return None if found is None else (int(found[1]), int(found[2]))

    @model_validator(mode="after")
    def _whole_conversations(self) -> WorkloadSection:
        if self.turns is not None:
            raise_value_error(_parse_turns, self.turns)
            alone = ("mix", "dataset", "trace", "conversations", "agents", "agent_trace")
            if any(getattr(self, name) for name in alone):
                raise ValueError(f"turns makes its own conversations; leave out {', '.join(alone)}")
        if self.agents is not None:
            raise_value_error(parse_agents, self.agents)
        if self.idle_cap_s is not None and self.agent_trace is None:
            raise ValueError("idle_cap_s shortens recorded gaps; give agent_trace")
        if self.begins_within and not self.has_agents:
            raise ValueError("begins_within is for sessions; give agents or agent_trace")
        if self.think_s is not None:
            raise_value_error(parse_seconds, self.think_s)
            if not self.has_sessions or self.has_agents:
                raise ValueError("think_s is a pause between turns; give turns or conversations")
        if self.shared_prefix and (self.dataset or self.conversations or self.has_agents):
            raise ValueError("shared_prefix is for generated prompts, not for recorded text")
        return self

    @property
    def begins_alike(self) -> bool:
        """Whether prompts share their beginnings by design, so that a prefix cache can help."""
        parts = self.shared_prefix or self.documents or self.trace
        return self.has_sessions or bool(parts)

    @property
    def has_sessions(self) -> bool:
        """Whether requests are turns of conversations, or belong to an agent's session."""
        return self.turns is not None or self.conversations is not None or self.has_agents

    @property
    def has_agents(self) -> bool:
        """Whether requests are those of agents' sessions."""
        return self.agents is not None or self.agent_trace is not None


class LoadSection(Section):
    """The load: users that each wait for their answer (concurrency), or arrivals at a rate.

    concurrency         levels, or auto: doubling until the server is full, finer at the knee
    search              find the highest concurrency or rate that meets the SLOs, starting at the
                        one value of `concurrency` or `rate_per_s` if given
    burstiness          of gamma arrivals: 1 is Poisson, lower values are bursts
    ramp_s              an open loop's rate rises from 0 over the first seconds of a level
    speed               of a trace, one level for each: 1 as recorded, 2 twice as fast
    repeat              runs of each level; with `until` the least number of them
    until               repeat until a metric is precise enough: `ttft_p90 +-5%`
    requests_per_user   closed loop: a level counts concurrency times this number, beside the first
                        request of each user; None: 3, and at least 32 in all
    requests_per_level  the same in all; overrides requests_per_user
    duration_s          time after which a level sends no more requests; with requests_per_level,
                        whichever comes first
    max_in_flight       maximum requests in flight; further ones wait
    sessions_per_level  conversations of a level; default: requests_per_user for each user
    max_sessions        maximum conversations at once, with a rate
    warmup_requests     requests before each level, which do not count
    """

    concurrency: Annotated[
        tuple[Users, ...] | Literal["auto"] | None, BeforeValidator(_levels_or_auto)
    ] = None
    rate_per_s: Annotated[tuple[PositiveRate, ...] | None, BeforeValidator(_as_list)] = None
    search: Literal["concurrency", "rate"] | None = None
    arrivals: Literal["constant", "poisson", "gamma"] = "poisson"
    burstiness: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    ramp_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    speed: Annotated[tuple[PositiveRate, ...], BeforeValidator(_as_list)] = (1.0,)
    repeat: PositiveInt = 1
    until: str | None = None
    requests_per_user: PositiveInt | None = None
    requests_per_level: PositiveInt | None = None
    duration_s: PositiveSeconds | None = None
    warmup_requests: Annotated[int, Field(ge=0)] = 1
    max_in_flight: PositiveInt | None = None
    sessions_per_level: PositiveInt | None = None
    max_sessions: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> LoadSection:
        if self.concurrency is not None and self.rate_per_s is not None:
            raise ValueError("give either concurrency or rate_per_s, not both")
        for name in ("concurrency", "rate_per_s"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} has no level; write for example [1, 2, 4]")
        if self.search is not None:
            self._check_search(self.search)
        if self.max_sessions is not None and self.rate_per_s is None:
            raise ValueError("max_sessions needs a rate; with concurrency that is the sessions")
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
        """Levels of the closed loop; empty if the load is a rate or chosen during the sweep."""
        if self.rate_per_s is not None or self.search is not None or self.concurrency == "auto":
            return ()
        return DEFAULT_CONCURRENCY if self.concurrency is None else self.concurrency


class EngineSection(Section):
    """Settings of the bundled and of the simulated engine; an endpoint keeps its own.

    None leaves a setting to the engine: the bundled one has its defaults, a simulated one those
    of its profile; blocks and lengths follow from memory and model. The run's manifest records
    the values in use.

    The help of an option says what its setting does (`sweep --help-all`); besides:

    follow_memory     keeps 5 % of the machine's memory free
    calibration       default: a short text in the package
    device            of the torch back end: triton's is always cuda
    compile           compiled steps are taken from the user's cache, if it has them
    enforce_eager     record no CUDA graphs
    group_query_attention  None: KV heads go to ranks evenly, as vLLM deals them
    draft_adaptive    drafts fewer tokens, or none, for a request whose drafts are often rejected
    """

    backend: Literal["auto", "native", "torch", "triton"] = "auto"
    device: Literal["cpu", "cuda"] | None = None
    compile: bool = False
    compile_shapes: str | None = None
    artefact: str | None = None
    enforce_eager: bool = False
    policy: Literal["none", "dynamic", "rolling"] = "rolling"
    kv_layout: Literal["paged", "contiguous"] | None = None
    batch_size: PositiveInt = 4
    max_batch_delay_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 100.0
    max_rolling_batch_size: PositiveInt | None = None
    max_rolling_batch_prefill_tokens: PositiveInt | None = None
    chunked_prefill: bool | None = None
    max_waiting_tokens: PositiveInt | None = None
    waiting_served_ratio: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_concurrent_requests: PositiveInt | None = None
    prefix_caching: bool | None = None
    recompute_on_join: bool | None = None
    follow_memory: bool | None = None
    max_input_tokens: PositiveInt | None = None
    max_batch_total_tokens: PositiveInt | None = None
    dtype: WeightDtype | None = None
    kv_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    tensor_parallel: PositiveInt | Literal["max"] | None = None
    group_query_attention: Literal["shard-over-heads", "replicated-heads"] | None = None
    replicas: PositiveInt = 1
    router: Literal["round_robin", "least_outstanding", "prefix_affine", "random"] = "round_robin"
    num_blocks: PositiveInt | None = None
    kv_tokens: PositiveInt | None = None
    block_size: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    rope_scaling: str | None = None
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    threads: PositiveInt | None = None
    quantize: Literal["none", "int8", "awq", "awq-int4", "awq-int3", "smoothquant", "fp8"] = "none"
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1)] = 0.8
    smoothquant_per_token: bool = True
    smoothquant_per_channel: bool = True
    calibration: str | None = None
    draft: Annotated[str, Field(min_length=1)] | None = None
    draft_tokens: PositiveInt = 4
    draft_adaptive: bool = True
    draft_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    profile: str | None = None


class SageMakerSection(Section):
    """The part of a SageMaker endpoint, and the address of its runtime if not at AWS."""

    endpoint_url: str | None = None
    inference_component: str | None = None
    target_variant: str | None = None
    custom_attributes: str | None = None


class ClientSection(Section):
    """How the load generator sends to an endpoint and takes its times.

    timestamps  kernel: the kernel's receive time; user: the read's; None: the kernel's if the
                host has it
    receive     reader of the sockets; native: a C library, built at first use; python: carries
                fewer streams; auto: native with a C compiler and without TLS
    first_token_timeout_s  a request fails if its first token takes longer
    retries     aws-standard: up to three attempts, as AWS's SDKs do; latency is from the first
    connections reuse: one for each request in flight, kept open; per-request: a new one each
                time; a number: at most so many, for which requests wait
    """

    timestamps: Literal["kernel", "user"] | None = None
    receive: Literal["auto", "native", "python"] = "auto"
    first_token_timeout_s: PositiveSeconds | None = None
    retries: Literal["aws-standard"] | None = None
    connections: Annotated[
        Literal["reuse", "per-request"] | PositiveInt, BeforeValidator(_connections)
    ] = "reuse"
