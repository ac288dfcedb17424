"""The workload and the load of a sweep: as options, and as fields of a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_mix
from lmi_bench.core.option import option


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What is asked of the target."""

    GROUP: ClassVar = "Workload"

    input_tokens: int | None = option(
        "Prompt length in tokens.", "--input-tokens", "--isl", default="256"
    )
    output_tokens: int | None = option(
        "Tokens to generate.", "--output-tokens", "--osl", default="256"
    )
    mix: str | None = option("Several kinds of request: IN/OUT[:SHARE],... such as 20/500,500/20.")
    dataset: Path | None = option(
        "Prompts as JSON lines with `prompt` and, if wanted, `output_tokens`."
    )
    input_lengths: str | None = option(
        "Distribution of prompt lengths in tokens: fixed(N), uniform(LOW,HIGH), "
        "normal(MEAN,STD[,MAX]), lognormal(MEAN,STD[,MAX]) or empirical(LENGTH:COUNT,...)."
    )
    output_lengths: str | None = option(
        "Distribution of output lengths in tokens; same forms as --input-lengths."
    )
    trace: Path | None = option("Recorded traffic: Azure's CSV or Mooncake's JSON lines.")
    shared_prefix: int | None = option(
        "Tokens with which every prompt begins, the same in all of them."
    )
    ignore_eos: bool | None = option(
        "Output length: as asked whatever the model says, or up to the model's end of text.",
        "--ignore-eos/--stop-at-eos",
        default="as asked",
        rare=True,
    )
    reuse_prompts: bool | None = option(
        "Prompts of every run: the same, which flatters prefix caches, or fresh ones.",
        "--reuse-prompts/--fresh-prompts",
        default="fresh",
        rare=True,
    )

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was stated.

        Raises InputError where two options state how long prompts or answers are.
        """
        self._check_lengths_stated_once()
        return {
            "workload.input_tokens": self.input_tokens,
            "workload.output_tokens": self.output_tokens,
            "workload.mix": None if self.mix is None else parse_mix(self.mix),
            "workload.dataset": _text(self.dataset),
            "workload.input_lengths": self.input_lengths,
            "workload.output_lengths": self.output_lengths,
            "workload.trace": _text(self.trace),
            "workload.shared_prefix": self.shared_prefix,
            "workload.ignore_eos": self.ignore_eos,
            "workload.reuse_prompts": self.reuse_prompts,
        }

    def _check_lengths_stated_once(self) -> None:
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
    """Conversations of several turns, each with all that was said before."""

    GROUP: ClassVar = "Conversations"

    turns: str | None = option(
        "Turns of a conversation: a number, or a distribution such as uniform(2,6)."
    )
    conversations: Path | None = option(
        "Recorded conversations: JSON lines of ShareGPT's `conversations` or `messages`."
    )
    think_time: str | None = option(
        "Seconds between an answer and the next turn: a number, exponential(MEAN), "
        "uniform(LOW,HIGH) or lognormal(MEAN,STD).",
        default="0",
    )
    sessions_per_level: int | None = option(
        "Conversations per level.", default="--requests-per-user for each user", rare=True
    )
    max_sessions: int | None = option(
        "Most conversations at once where --rate begins them.", rare=True
    )
    max_in_flight: int | None = option("Most requests of all conversations at once.", rare=True)

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was stated."""
        return {
            "workload.turns": self.turns,
            "workload.conversations": _text(self.conversations),
            "workload.think_s": self.think_time,
            "load.sessions_per_level": self.sessions_per_level,
            "load.max_sessions": self.max_sessions,
            "load.max_in_flight": self.max_in_flight,
        }


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How much is sent at once, and for how long."""

    GROUP: ClassVar = "Load"

    concurrency: str | None = option(
        "Users at once in a closed loop, a level each: 1,2,4,8; or auto, which doubles until "
        "the target is full and goes finer round the knee.",
        "--concurrency",
        "--max-concurrency",
        default="auto; bundled engine: 1,2,4,8,16,32",
    )
    rate: str | None = option(
        "Requests per second in an open loop, a level each: 0.5,1,2.", "--rate", "--request-rate"
    )
    search: str | None = option(
        "Axis of a search for the highest load that meets every --slo: concurrency or rate."
    )
    requests_per_level: int | None = option(
        "Requests per level; overrides --requests-per-user.",
        "--requests-per-level",
        "--num-prompts",
    )
    duration: float | None = option(
        "Duration of a level's sending in seconds.", default="until its requests are sent"
    )
    speed: str | None = option(
        "Speeds of a trace, a level each: 1 as recorded, 2 twice as fast.", default="1", rare=True
    )
    arrivals: str | None = option(
        "Arrival process of an open loop: poisson, constant or gamma.", default="poisson", rare=True
    )
    burstiness: float | None = option(
        "Burstiness of gamma arrivals: 1 is Poisson, less is burstier.", default="1", rare=True
    )
    ramp: float | None = option(
        "Seconds over which an open loop's rate rises from 0.", default="0", rare=True
    )
    repeat: int | None = option("Number of runs of every level, in rounds.", default="1", rare=True)
    until: str | None = option(
        "Precision at which repeating ends: a metric and its interval, 'ttft_p90 +-5%'.", rare=True
    )
    requests_per_user: int | None = option(
        "Requests per user and level in a closed loop.", default="3", rare=True
    )
    warmup_requests: int | None = option(
        "Requests sent before each level and left out of it.", default="1", rare=True
    )

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was stated.

        A rate with a concurrency is a rate with at most so many requests at once; an infinite
        rate, which other tools write for none, leaves the concurrency alone.
        """
        concurrency = _concurrency(self.concurrency)
        rate = None if self.rate is None else _numbers("--rate", self.rate)
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
        arrivals = self.arrivals
        if arrivals is None and self.burstiness is not None:
            arrivals = "gamma"
        return {
            "load.speed": None if self.speed is None else _numbers("--speed", self.speed),
            "load.concurrency": concurrency,
            "load.rate_per_s": rate,
            "load.max_in_flight": cap,
            "load.search": self.search,
            "load.arrivals": arrivals,
            "load.burstiness": self.burstiness,
            "load.ramp_s": self.ramp,
            "load.repeat": self.repeat,
            "load.until": self.until,
            "load.requests_per_user": self.requests_per_user,
            "load.requests_per_level": self.requests_per_level,
            "load.duration_s": self.duration,
            "load.warmup_requests": self.warmup_requests,
        }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _concurrency(text: str | None) -> Sequence[float | int] | str | None:
    return text if text in (None, "auto") else _numbers("--concurrency", text)


def _numbers(flag: str, text: str) -> list[float | int]:
    """The numbers of a comma list; raises InputError that names the flag and the part."""
    numbers: list[float | int] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise InputError(f"{flag}: {part!r} is not a number; write for example 1,2,4") from None
        numbers.append(int(value) if value.is_integer() else value)
    return numbers
