"""What `sweep` is told of the workload and of the load, as options and as scenario fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_mix

_WORKLOAD, _SESSIONS, _LOAD = "Workload", "Conversations", "Load"


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What is asked."""

    input_tokens: Annotated[
        int | None,
        typer.Option(
            "--input-tokens",
            "--isl",
            help="Tokens of a prompt. (default: 256)",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    output_tokens: Annotated[
        int | None,
        typer.Option(
            "--output-tokens",
            "--osl",
            help="Tokens to generate. (default: 256)",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    mix: Annotated[
        str | None,
        typer.Option(
            help="Several kinds of request: IN/OUT[:SHARE],... such as 20/500,500/20.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` and, if wanted, `output_tokens`.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    input_lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths in tokens: fixed(N), uniform(LOW,HIGH), normal(MEAN,STD[,MAX]), "
            "lognormal(MEAN,STD[,MAX]) or empirical(LENGTH:COUNT,...).",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    output_lengths: Annotated[
        str | None,
        typer.Option(help="Likewise, of the answers.", rich_help_panel=_WORKLOAD),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded traffic: Azure's CSV or Mooncake's JSON lines.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Generate the asked length whatever the model says. (default: ignore)",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    reuse_prompts: Annotated[
        bool | None,
        typer.Option(
            "--reuse-prompts/--fresh-prompts",
            help="Send the same prompts in every run (flatters prefix caches).",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None
    shared_prefix: Annotated[
        int | None,
        typer.Option(
            help="Tokens at the beginning of every prompt that are the same in all of them.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was said.

        Raises InputError where two flags say how long prompts or answers are.
        """
        self._check_lengths_said_once()
        return {
            "workload.input_tokens": self.input_tokens,
            "workload.output_tokens": self.output_tokens,
            "workload.mix": None if self.mix is None else parse_mix(self.mix),
            "workload.dataset": None if self.dataset is None else str(self.dataset),
            "workload.input_lengths": self.input_lengths,
            "workload.output_lengths": self.output_lengths,
            "workload.trace": None if self.trace is None else str(self.trace),
            "workload.shared_prefix": self.shared_prefix,
            "workload.ignore_eos": self.ignore_eos,
            "workload.reuse_prompts": self.reuse_prompts,
        }

    def _check_lengths_said_once(self) -> None:
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
class SessionOptions:
    """Conversations of several turns, each with all that was said before."""

    turns: Annotated[
        str | None,
        typer.Option(
            help="Turns of a conversation: a number, or a distribution such as uniform(2,6).",
            rich_help_panel=_SESSIONS,
        ),
    ] = None
    conversations: Annotated[
        Path | None,
        typer.Option(
            help="Recorded ones: JSON lines of ShareGPT's `conversations` or of `messages`.",
            rich_help_panel=_SESSIONS,
        ),
    ] = None
    think_time: Annotated[
        str | None,
        typer.Option(
            help="Seconds between an answer and the next turn: a number, exponential(MEAN), "
            "uniform(LOW,HIGH) or lognormal(MEAN,STD). (default: 0)",
            rich_help_panel=_SESSIONS,
        ),
    ] = None
    sessions_per_level: Annotated[
        int | None,
        typer.Option(
            help="Conversations of a level. (default: --requests-per-user for each user)",
            rich_help_panel=_SESSIONS,
        ),
    ] = None
    max_sessions: Annotated[
        int | None,
        typer.Option(
            help="Most conversations at once where --rate begins them.", rich_help_panel=_SESSIONS
        ),
    ] = None
    max_in_flight: Annotated[
        int | None,
        typer.Option(help="Most requests of all conversations at once.", rich_help_panel=_SESSIONS),
    ] = None

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was said."""
        return {
            "workload.turns": self.turns,
            "workload.conversations": None
            if self.conversations is None
            else str(self.conversations),
            "workload.think_s": self.think_time,
            "load.sessions_per_level": self.sessions_per_level,
            "load.max_sessions": self.max_sessions,
            "load.max_in_flight": self.max_in_flight,
        }


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How much at once, and for how long."""

    speed: Annotated[
        str | None,
        typer.Option(
            help="Of a trace, a level each: 1 as recorded, 2 twice as fast.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            help="Closed loop: users at once, a level each: 1,2,4,8; or auto (doubling until full, "
            "then finer round the knee). (default: auto for a URL, else 1,2,4,8,16,32)",
            rich_help_panel=_LOAD,
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            "--request-rate",
            help="Open loop: requests per second, a level each: 0.5,1,2.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    search: Annotated[
        str | None,
        typer.Option(
            help="concurrency or rate: find the highest that meets every --slo, to 5 %.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Of an open loop: poisson, constant or gamma. (default: poisson)",
            rich_help_panel=_LOAD,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Of gamma arrivals: 1 is Poisson, less is burstier. (default: 1)",
            rich_help_panel=_LOAD,
        ),
    ] = None
    ramp: Annotated[
        float | None,
        typer.Option(
            "--ramp",
            help="Seconds over which an open loop's rate rises from 0. (default: 0)",
            rich_help_panel=_LOAD,
        ),
    ] = None
    repeat: Annotated[
        int | None,
        typer.Option(
            help="Run every level this often, in rounds. (default: 1)", rich_help_panel=_LOAD
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            help="Repeat until a metric is known well enough: 'ttft_p90 +-5%'.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    requests_per_user: Annotated[
        int | None,
        typer.Option(
            help="Closed loop: a level sends this many a user. (default: 3)", rich_help_panel=_LOAD
        ),
    ] = None
    requests_per_level: Annotated[
        int | None,
        typer.Option(
            "--requests-per-level",
            "--num-prompts",
            help="Requests of every level, instead.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            help="Seconds that a level sends for. (default: until its requests are sent)",
            rich_help_panel=_LOAD,
        ),
    ] = None
    warmup_requests: Annotated[
        int | None,
        typer.Option(
            help="Sent before each level and left out of it. (default: 1)", rich_help_panel=_LOAD
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was said.

        A rate with a concurrency is a rate with at most so many requests at once; an infinite
        rate, which others write for none, leaves the concurrency alone.
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


def _concurrency(text: str | None) -> list[float | int] | str | None:
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
