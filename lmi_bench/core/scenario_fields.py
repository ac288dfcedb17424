"""The fields of a scenario: type, default and option of each, declared once.

`scenario_sections` checks their values, `jobs/settings` makes them options of the commands. The
help of an option is the text of its field in the class's docstring, whose prose says what is to
know besides. Nothing here loads pydantic, so that a command's help is there at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_adapters, parse_mix
from lmi_bench.core.option import option

PositiveInt = Annotated[int, Gt(0), Le(10**9)]
Seed = Annotated[int, Gt(-(2**63)), Lt(2**63)]
Positive = Annotated[float, Gt(0), Le(1e15)]
NotNegative = Annotated[float, Ge(0), Le(1e15)]
Text = Annotated[str, MinLen(1)]
File = Annotated[str, Path]
"""A text that is typed as a path."""
Users = Annotated[int, Gt(0), Le(1_000_000)]
"""Users of one level; each is an asyncio task."""


class Fields:
    """Fields of one section of a scenario, and how help lists their options.

    SECTION  name in the scenario; "": the fields stand at the top
    GROUP    heading; None: that of the settings around
    COMMON   fields that plain help lists; None: all but the rare ones
    """

    SECTION: ClassVar[str] = ""
    GROUP: ClassVar[str | None] = None
    COMMON: ClassVar[tuple[str, ...] | None] = None


def _timeout(text: str) -> float | str:
    """Seconds, or the word none, as a scenario takes them."""
    try:
        return text if text == "none" else float(text)
    except ValueError:
        raise InputError(f"--timeout: {text!r} is neither a number of seconds nor none") from None


@dataclass(frozen=True)
class TopFields(Fields):
    """What stands beside the sections.

    name  Name of the run in reports.
    target  Target: engine (bundled, this machine), sim:INSTANCE (virtual time), a URL, or
        sagemaker:NAME.
    model  Model: a catalog name, a folder, or the name that the endpoint knows.
    protocol  Protocol of an endpoint: openai, openai-chat, lmi or tgi; or, only if stated,
        openai-responses, anthropic or embeddings.
    stream  Answers: streamed, or whole, with only the total time known.
    timeout_s  Seconds after which a request fails and the sweep ends, or none.
    seed  Random seed of lengths, prompts and arrivals.
    slo  SLO such as ttft_p90<=1s; repeatable. Exit 99 if no level meets them all, 2 if unknown.
    """

    name: str = option(value="", rare=True)
    target: Text = option("--target", "--base-url", value="engine")
    model: Text = option("--model", "-m", value="", default="the endpoint's; else demo-15m")
    protocol: Literal["auto", "openai", "openai-chat", "openai-responses", "anthropic", "embeddings", "lmi", "tgi"] = (
        option(value="auto", default="found by asking it")
    )
    stream: bool = option(value=True, default="streamed", rare=True)
    timeout_s: Positive | None = option(default="none; SageMaker: 480 streaming, 60 without", kind=str, read=_timeout)
    seed: Seed = option(value=0)
    slo: tuple[str, ...] = option(value=())


@dataclass(frozen=True)
class SageMakerFields(Fields):
    """The part of a SageMaker endpoint, and the address of its runtime if not at AWS.

    endpoint_url  URL of a SageMaker runtime that is not at AWS.
    inference_component  Inference component of a SageMaker endpoint.
    target_variant  Variant of a SageMaker endpoint.
    """

    SECTION = "sagemaker"
    COMMON: ClassVar[tuple[str, ...]] = ()

    endpoint_url: str | None = option(setting="sagemaker_endpoint_url")
    inference_component: str | None = option()
    target_variant: str | None = option()
    custom_attributes: str | None = None


@dataclass(frozen=True)
class ClientFields(Fields):
    """How the load generator sends to an endpoint and takes its times.

    The kernel's clock has the time of receipt, the user's that of the read. The python reader
    carries fewer streams; auto is native with a C compiler and without TLS. A retried request has
    up to three attempts, and its latency is from the first. With a number of connections requests
    wait for one.

    timestamps  Clock of the receive times: kernel or user.
    receive  Socket reader: native (C, built at first use), python, or auto.
    first_token_timeout_s  Seconds after which a request without a token fails and the sweep ends.
    retries  Retries of transient failures: aws-standard, as AWS SDKs do.
    connections  Connections: reuse (one for each concurrent request), per-request, or a maximum
        number.
    adapters  Adapters of the model and their shares, NAME[:SHARE],...: one for each request; a
        conversation keeps its own.
    session_header  Header, such as X-Session-ID, with the conversation's id, for routers with
        affinity.
    reset_prefix_cache  Emptied prefix cache before each level, by vLLM's or SGLang's own request.
    priority  Priority of the receiving threads: realtime (SCHED_FIFO, else nice -10) or normal.
    cacert  PEM file of the certificate authorities to trust.
    insecure  Server certificates: not checked, or checked.
    """

    SECTION = "client"
    COMMON: ClassVar[tuple[str, ...]] = ()

    timestamps: Literal["kernel", "user"] | None = option(default="kernel if available")
    receive: Literal["auto", "native", "python"] = option(value="auto")
    first_token_timeout_s: Positive | None = option()
    retries: Literal["aws-standard"] | None = option(default="none")
    connections: Literal["reuse", "per-request"] | PositiveInt = option(
        value="reuse", read=lambda text: int(text) if text.isdecimal() else text
    )
    adapters: dict[Text, Positive] | None = option(default="none: the model itself", kind=str, read=parse_adapters)
    session_header: Text | None = option()
    reset_prefix_cache: bool = option("--reset-prefix-cache", value=False)
    priority: Literal["normal", "realtime"] | None = option(
        default="realtime if the endpoint is on another machine", rare=True
    )
    cacert: File | None = option(default="the system's", rare=True)
    insecure: bool = option("--insecure", value=False, rare=True)


@dataclass(frozen=True)
class WorkloadFields(Fields):
    """The requests, with lengths in tokens.

    A mix replaces both lengths, a distribution one of them; a trace has lengths and, in an open
    loop, times. A data set may have `text` for `prompt`; a relative path is relative to the
    scenario file. Documents stand behind the shared prefix. Both are a part of input_tokens, but
    beside what a turn of `turns` adds.

    input_tokens  Prompt length in tokens.
    output_tokens  Output length in tokens.
    mix  Mix of requests: IN/OUT[:SHARE],... such as 20/500,500/20.
    dataset  Prompts as JSON lines with `prompt` and, optionally, `output_tokens`.
    input_lengths  Distribution of prompt lengths in tokens: fixed(N), uniform(LOW,HIGH),
        normal(MEAN,STD[,MAX]), lognormal(MEAN,STD[,MAX]) or empirical(LENGTH:COUNT,...).
    output_lengths  Distribution of output lengths in tokens; same forms as --input-lengths.
    trace  Recorded traffic: Azure's or BurstGPT's CSV, Mooncake's or Bailian's JSON lines.
    shared_prefix  Length in tokens of a prefix that all prompts share.
    documents  Documents, COUNTxTOKENS such as 1000x1500: one in each prompt, the k-th most popular
        with a chance of 1/k.
    ignore_eos  Output length: as requested, even past the model's end of text, or up to that end.
    reuse_prompts  Prompts of every run: the same, which flatters prefix caches, or fresh ones.
    """

    SECTION = "workload"
    GROUP = "Workload"

    input_tokens: PositiveInt = option("--input-tokens", "--isl", value=256)
    output_tokens: PositiveInt = option("--output-tokens", "--osl", value=256)
    mix: tuple[Any, ...] = option(value=(), read=parse_mix)
    dataset: File | None = option()
    input_lengths: str | None = option()
    output_lengths: str | None = option()
    trace: File | None = option()
    shared_prefix: Annotated[int, Ge(0)] = option(value=0)
    documents: str | None = option(rare=True)
    ignore_eos: bool = option("--ignore-eos/--stop-at-eos", value=True, default="as requested", rare=True)
    reuse_prompts: bool = option("--reuse-prompts/--fresh-prompts", value=False, default="fresh", rare=True)


@dataclass(frozen=True)
class SessionFields(Fields):
    """Conversations of several turns: each prompt contains the earlier ones.

    input_tokens is what a turn adds. `AgentShape` has the names of agents; "" is its defaults.

    turns  Turns of a conversation: a number, or a distribution such as uniform(2,6).
    conversations  Recorded conversations: JSON lines of ShareGPT's `conversations` or `messages`.
    agents  Agent sessions, made up: default, or steps=uniform(6,18),fan_chance=0.15,...
        (docs/agents.md): tool calls with a growing context, sub-agents side by side.
    agent_trace  Agent sessions, recorded: Weka's, Qwen-Bailian's or OTLP spans. --concurrency
        counts sessions.
    idle_cap_s  Longest gap in seconds between the starts of a recorded session's requests.
    begins_within  First sessions: from their middle, with a primed cache, or from their beginning.
    think_s  Seconds between an answer and the next turn: a number, exponential(MEAN),
        uniform(LOW,HIGH) or lognormal(MEAN,STD).
    """

    SECTION = "workload"
    GROUP = "Conversations"

    turns: str | None = option()
    conversations: File | None = option(rare=True)
    agents: str | None = option(read=lambda text: "" if text == "default" else text)
    agent_trace: File | None = option()
    idle_cap_s: NotNegative | None = option(default="as recorded", rare=True)
    begins_within: bool = option("--begin-within/--begin-at-start", value=False, default="at start", rare=True)
    think_s: str | None = option(default="0", setting="think_time", rare=True)


@dataclass(frozen=True)
class LoadFields(Fields):
    """The load: users that each wait for their answer (concurrency), or arrivals at a rate.

    A search starts at the one value of `concurrency` or `rate_per_s`, if given. With `until`,
    repeat is the least number of runs. The first request of each user is beside
    requests_per_user. Of duration_s and requests_per_level, whichever comes first ends a level.

    concurrency  Users of a closed loop, a level each: 1,2,4; or auto: doubled, then finer near the
        knee.
    rate_per_s  Requests per second of an open loop, a level each: 0.5,1,2.
    search  Axis of a search for the highest load that meets every --slo: concurrency or rate.
    requests_per_level  Requests per level, beside the first of each user; overrides
        --requests-per-user.
    duration_s  Duration of a level's sending in seconds.
    speed  Speeds of a trace, a level each: 1 as recorded, 2 twice as fast.
    arrivals  Arrival process of an open loop: poisson, constant or gamma.
    burstiness  Burstiness of gamma arrivals: 1 is Poisson, less is burstier.
    ramp_s  Seconds over which an open loop's rate rises from 0.
    repeat  Number of runs of every level, in rounds.
    until  Precision at which repeats end: a metric and its interval, 'ttft_p90 +-5%'.
    repeat_unsteady  Further runs at most of a level that was not steady: until two runs agree.
    stop_when  Percentile that ends a level once its 95 % interval is that narrow: 'ttft_p99:5%'.
    requests_per_user  Requests per user and level of a closed loop.
    warmup_requests  Warm-up requests before each level, not counted in it.
    """

    SECTION = "load"
    GROUP = "Load"
    COMMON: ClassVar[tuple[str, ...]] = ("concurrency", "rate_per_s", "search", "requests_per_level", "duration_s")

    concurrency: tuple[Users, ...] | Literal["auto"] | None = option(
        "--concurrency", "--max-concurrency", default="auto; bundled engine: 1,2,4,8,16,32"
    )
    rate_per_s: tuple[Positive, ...] | None = option("--rate", "--request-rate")
    search: Literal["concurrency", "rate"] | None = option()
    requests_per_level: PositiveInt | None = option("--requests-per-level", "--num-prompts")
    duration_s: Positive | None = option(default="until its requests are sent")
    speed: tuple[Positive, ...] = option(value=(1.0,))
    arrivals: Literal["constant", "poisson", "gamma"] = option(value="poisson")
    burstiness: Positive = option(value=1.0)
    ramp_s: NotNegative = option(value=0.0)
    repeat: PositiveInt = option(value=1)
    until: str | None = option()
    repeat_unsteady: Annotated[int, Ge(0)] | None = option(default="2; simulated: 0")
    stop_when: str | None = option()
    requests_per_user: PositiveInt | None = option(default="3, and at least 32 per level")
    warmup_requests: Annotated[int, Ge(0), Le(10**9)] = option(value=1)


@dataclass(frozen=True)
class SessionLoadFields(Fields):
    """The load of conversations; requests beyond max_in_flight wait.

    sessions_per_level  Conversations per level.
    max_sessions  Maximum concurrent conversations if --rate starts them.
    max_in_flight  Maximum concurrent requests of all conversations.
    """

    SECTION = "load"
    GROUP = "Conversations"
    COMMON: ClassVar[tuple[str, ...]] = ()

    sessions_per_level: PositiveInt | None = option(default="--requests-per-user for each user")
    max_sessions: PositiveInt | None = option()
    max_in_flight: PositiveInt | None = option()
