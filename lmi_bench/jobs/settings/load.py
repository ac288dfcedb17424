"""Settings of a sweep's workload and load."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option

AXES: Final = ("concurrency", "rate", "arrivals")
"""Settings of the load whose meaning depends on each other."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """The requests that the target gets."""

    GROUP: ClassVar = "Workload"

    input_tokens: int | None = option(
        "Prompt length in tokens.", "--input-tokens", "--isl", default="256"
    )
    output_tokens: int | None = option(
        "Output length in tokens.", "--output-tokens", "--osl", default="256"
    )
    mix: str | None = option("Mix of requests: IN/OUT[:SHARE],... such as 20/500,500/20.")
    dataset: Path | None = option(
        "Prompts as JSON lines with `prompt` and, optionally, `output_tokens`."
    )
    input_lengths: str | None = option(
        "Distribution of prompt lengths in tokens: fixed(N), uniform(LOW,HIGH), "
        "normal(MEAN,STD[,MAX]), lognormal(MEAN,STD[,MAX]) or empirical(LENGTH:COUNT,...)."
    )
    output_lengths: str | None = option(
        "Distribution of output lengths in tokens; same forms as --input-lengths."
    )
    trace: Path | None = option(
        "Recorded traffic: Azure's or BurstGPT's CSV, Mooncake's or Bailian's JSON lines."
    )
    shared_prefix: int | None = option("Length in tokens of a prefix that all prompts share.")
    documents: str | None = option(
        "Documents, COUNTxTOKENS such as 1000x1500: one in each prompt, the k-th most popular with "
        "a chance of 1/k.",
        rare=True,
    )
    ignore_eos: bool | None = option(
        "Output length: as requested, even past the model's end of text, or up to that end.",
        "--ignore-eos/--stop-at-eos",
        default="as requested",
        rare=True,
    )
    reuse_prompts: bool | None = option(
        "Prompts of every run: the same, which flatters prefix caches, or fresh ones.",
        "--reuse-prompts/--fresh-prompts",
        default="fresh",
        rare=True,
    )

    def __post_init__(self) -> None:
        both_ways = {"--mix": self.mix, "--trace": self.trace}
        for fixed, tokens, others in (
            ("--isl", self.input_tokens, {"--input-lengths": self.input_lengths}),
            ("--osl", self.output_tokens, {"--output-lengths": self.output_lengths}),
        ):
            for flag, value in (others | both_ways).items():
                if tokens is not None and value is not None:
                    raise InputError(
                        f"{fixed} {tokens} and {flag} {value} both state lengths: leave one out"
                    )


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Conversations of several turns; each request repeats the earlier turns."""

    GROUP: ClassVar = "Conversations"

    turns: str | None = option(
        "Turns of a conversation: a number, or a distribution such as uniform(2,6)."
    )
    conversations: Path | None = option(
        "Recorded conversations: JSON lines of ShareGPT's `conversations` or `messages`.",
        rare=True,
    )
    agents: str | None = option(
        "Agent sessions, made up: default, or steps=uniform(6,18),fan_chance=0.15,... "
        "(docs/agents.md): tool calls with a growing context, sub-agents side by side."
    )
    agent_trace: Path | None = option(
        "Agent sessions, recorded: a file or folder of Weka's JSON. --concurrency counts sessions."
    )
    idle_cap: float | None = option(
        "Longest gap in seconds between the starts of a recorded session's requests.",
        default="as recorded",
        rare=True,
    )
    begins_within: bool | None = option(
        "First sessions: from their middle, with a primed cache, or from their beginning.",
        "--begin-within/--begin-at-start",
        default="at start",
        rare=True,
    )
    think_time: str | None = option(
        "Seconds between an answer and the next turn: a number, exponential(MEAN), "
        "uniform(LOW,HIGH) or lognormal(MEAN,STD).",
        default="0",
        rare=True,
    )
    sessions_per_level: int | None = option(
        "Conversations per level.", default="--requests-per-user for each user", rare=True
    )
    max_sessions: int | None = option(
        "Maximum concurrent conversations if --rate starts them.", rare=True
    )
    max_in_flight: int | None = option(
        "Maximum concurrent requests of all conversations.", rare=True
    )


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The levels of load, and their length."""

    GROUP: ClassVar = "Load"
    COMMON: ClassVar = ("concurrency", "rate", "search", "requests_per_level", "duration")

    concurrency: str | None = option(
        "Users of a closed loop, a level each: 1,2,4; or auto: doubled, then finer near the knee.",
        "--concurrency",
        "--max-concurrency",
        default="auto; bundled engine: 1,2,4,8,16,32",
    )
    rate: str | None = option(
        "Requests per second of an open loop, a level each: 0.5,1,2.", "--rate", "--request-rate"
    )
    search: str | None = option(
        "Axis of a search for the highest load that meets every --slo: concurrency or rate."
    )
    requests_per_level: int | None = option(
        "Requests per level, beside the first of each user; overrides --requests-per-user.",
        "--requests-per-level",
        "--num-prompts",
    )
    duration: float | None = option(
        "Duration of a level's sending in seconds.", default="until its requests are sent"
    )
    speed: str | None = option(
        "Speeds of a trace, a level each: 1 as recorded, 2 twice as fast.", default="1"
    )
    arrivals: str | None = option(
        "Arrival process of an open loop: poisson, constant or gamma.", default="poisson"
    )
    burstiness: float | None = option(
        "Burstiness of gamma arrivals: 1 is Poisson, less is burstier.", default="1"
    )
    ramp: float | None = option("Seconds over which an open loop's rate rises from 0.", default="0")
    repeat: int | None = option("Number of runs of every level, in rounds.", default="1")
    until: str | None = option(
        "Precision at which repeats end: a metric and its interval, 'ttft_p90 +-5%'."
    )
    requests_per_user: int | None = option(
        "Requests per user and level of a closed loop.", default="3, and at least 32 per level"
    )
    warmup_requests: int | None = option(
        "Warm-up requests before each level, not counted in it.", default="1"
    )

    def axes(self) -> dict[str, Any]:
        """What AXES state, by dotted names in the scenario.

        A concurrency beside a rate caps the requests in flight. An infinite rate, other tools'
        word for none, is left out.
        """
        concurrency: Sequence[float | int] | str | None = self.concurrency
        if concurrency not in (None, "auto"):
            concurrency = numbers("--concurrency", str(concurrency))
        rate = None if self.rate is None else numbers("--rate", self.rate)
        cap = None
        if rate is not None and any(value == float("inf") for value in rate):
            if len(rate) > 1 or concurrency is None:
                raise InputError(
                    "--rate inf is no rate: to send all at once give --concurrency N alone, else "
                    "requests per second"
                )
            rate = None
        if rate is not None and concurrency is not None:
            if isinstance(concurrency, str) or len(concurrency) > 1:
                raise InputError(
                    "--rate with --max-concurrency caps the requests in flight: give one number, "
                    f"got {self.concurrency}"
                )
            cap, concurrency = concurrency[0], None
        is_gamma = self.arrivals is None and self.burstiness is not None
        found = {
            "load.concurrency": concurrency,
            "load.rate_per_s": rate,
            "load.max_in_flight": cap,
            "load.arrivals": "gamma" if is_gamma else self.arrivals,
        }
        return {name: value for name, value in found.items() if value is not None}


def numbers(flag: str, text: str) -> list[float | int]:
    """The numbers of a comma list; raises InputError that names the option and the part."""
    found: list[float | int] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise InputError(f"{flag}: {part!r} is not a number; write for example 1,2,4") from None
        found.append(int(value) if value.is_integer() else value)
    return found
