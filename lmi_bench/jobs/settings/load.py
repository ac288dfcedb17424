"""The workload and the load of a sweep: as options, and as fields of a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_mix
from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What is asked of the target."""

    GROUP: ClassVar = "Workload"

    input_tokens: Annotated[
        int | None,
        Option("Prompt length in tokens.", ("--input-tokens", "--isl"), default="256"),
    ] = None
    output_tokens: Annotated[
        int | None,
        Option("Tokens to generate.", ("--output-tokens", "--osl"), default="256"),
    ] = None
    mix: Annotated[
        str | None,
        Option("Several kinds of request: IN/OUT[:SHARE],... such as 20/500,500/20."),
    ] = None
    dataset: Annotated[
        Path | None,
        Option("Prompts as JSON lines with `prompt` and, if wanted, `output_tokens`."),
    ] = None
    input_lengths: Annotated[
        str | None,
        Option(
            "Distribution of prompt lengths in tokens: fixed(N), uniform(LOW,HIGH), "
            "normal(MEAN,STD[,MAX]), lognormal(MEAN,STD[,MAX]) or empirical(LENGTH:COUNT,...)."
        ),
    ] = None
    output_lengths: Annotated[
        str | None,
        Option("Distribution of output lengths in tokens; same forms as --input-lengths."),
    ] = None
    trace: Annotated[
        Path | None, Option("Recorded traffic: Azure's CSV or Mooncake's JSON lines.")
    ] = None
    shared_prefix: Annotated[
        int | None, Option("Tokens with which every prompt begins, the same in all of them.")
    ] = None
    ignore_eos: Annotated[
        bool | None,
        Option(
            "Output length: as asked whatever the model says, or up to the model's end of text.",
            ("--ignore-eos/--stop-at-eos",),
            default="as asked",
            rare=True,
        ),
    ] = None
    reuse_prompts: Annotated[
        bool | None,
        Option(
            "Prompts of every run: the same, which flatters prefix caches, or fresh ones.",
            ("--reuse-prompts/--fresh-prompts",),
            default="fresh",
            rare=True,
        ),
    ] = None

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

    turns: Annotated[
        str | None,
        Option("Turns of a conversation: a number, or a distribution such as uniform(2,6)."),
    ] = None
    conversations: Annotated[
        Path | None,
        Option("Recorded conversations: JSON lines of ShareGPT's `conversations` or `messages`."),
    ] = None
    think_time: Annotated[
        str | None,
        Option(
            "Seconds between an answer and the next turn: a number, exponential(MEAN), "
            "uniform(LOW,HIGH) or lognormal(MEAN,STD).",
            default="0",
        ),
    ] = None
    sessions_per_level: Annotated[
        int | None,
        Option("Conversations per level.", default="--requests-per-user for each user", rare=True),
    ] = None
    max_sessions: Annotated[
        int | None,
        Option("Most conversations at once where --rate begins them.", rare=True),
    ] = None
    max_in_flight: Annotated[
        int | None, Option("Most requests of all conversations at once.", rare=True)
    ] = None

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

    concurrency: Annotated[
        str | None,
        Option(
            "Users at once in a closed loop, a level each: 1,2,4,8; or auto, which doubles until "
            "the target is full and goes finer round the knee.",
            ("--concurrency", "--max-concurrency"),
            default="auto; bundled engine: 1,2,4,8,16,32",
        ),
    ] = None
    rate: Annotated[
        str | None,
        Option(
            "Requests per second in an open loop, a level each: 0.5,1,2.",
            ("--rate", "--request-rate"),
        ),
    ] = None
    search: Annotated[
        str | None,
        Option(
            "Axis of a search for the highest load that meets every --slo: concurrency or rate."
        ),
    ] = None
    requests_per_level: Annotated[
        int | None,
        Option(
            "Requests per level; overrides --requests-per-user.",
            ("--requests-per-level", "--num-prompts"),
        ),
    ] = None
    duration: Annotated[
        float | None,
        Option("Duration of a level's sending in seconds.", default="until its requests are sent"),
    ] = None
    speed: Annotated[
        str | None,
        Option(
            "Speeds of a trace, a level each: 1 as recorded, 2 twice as fast.",
            default="1",
            rare=True,
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        Option(
            "Arrival process of an open loop: poisson, constant or gamma.",
            default="poisson",
            rare=True,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        Option(
            "Burstiness of gamma arrivals: 1 is Poisson, less is burstier.", default="1", rare=True
        ),
    ] = None
    ramp: Annotated[
        float | None,
        Option("Seconds over which an open loop's rate rises from 0.", default="0", rare=True),
    ] = None
    repeat: Annotated[
        int | None, Option("Number of runs of every level, in rounds.", default="1", rare=True)
    ] = None
    until: Annotated[
        str | None,
        Option(
            "Precision at which repeating ends: a metric and its interval, 'ttft_p90 +-5%'.",
            rare=True,
        ),
    ] = None
    requests_per_user: Annotated[
        int | None, Option("Requests per user and level in a closed loop.", default="3", rare=True)
    ] = None
    warmup_requests: Annotated[
        int | None,
        Option("Requests sent before each level and left out of it.", default="1", rare=True),
    ] = None

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
