"""Settings of `sweep`: the target, the limits, the run folder, the load generator."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_mix
from lmi_bench.core.option import Option, option, values_of
from lmi_bench.jobs.settings.engine import (
    STEP_TRACE,
    BatchingOptions,
    ModelOptions,
    stated_settings,
)
from lmi_bench.jobs.settings.load import (
    AXES,
    LoadSettings,
    SessionSettings,
    WorkloadSettings,
    numbers,
)

API_KEY: Final = Option(
    "Key sent as a bearer token, to Anthropic's API as x-api-key; never written to a file.",
    envvar="LMI_BENCH_API_KEY",
)

HEADER: Final = Option("Header of every request, 'Name: value'; repeatable.", ("--header", "-H"))


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The target that is measured, and its protocol."""

    GROUP: ClassVar = "Target"

    scenario: str | None = option(
        "Scenario file, URL, sagemaker:NAME, or sim:INSTANCE to simulate.",
        argument=True,
        metavar="[SCENARIO.yaml|TARGET]",
        group="Arguments",
    )
    matrix: Path | None = option(
        "File of targets and payloads: every payload on every target, one report."
    )
    target: str | None = option(
        "Target: engine (bundled, this machine), sim:INSTANCE (virtual time), a URL, or "
        "sagemaker:NAME.",
        "--target",
        "--base-url",
        default="engine",
    )
    model: str | None = option(
        "Model: a catalog name, a folder, or the name that the endpoint knows.",
        "--model",
        "-m",
        default="the endpoint's; else demo-15m",
    )
    protocol: str | None = option(
        "Protocol of an endpoint: openai, openai-chat, lmi or tgi; or, only if stated, "
        "openai-responses or anthropic.",
        default="found by asking it",
    )
    api_key: str | None = option(API_KEY)
    header: tuple[str, ...] = option(HEADER, value=())
    stream: bool | None = option(
        "Answers: streamed, or whole, with only the total time known.",
        default="streamed",
        rare=True,
    )
    sagemaker_endpoint_url: str | None = option(
        "URL of a SageMaker runtime that is not at AWS.", rare=True
    )
    inference_component: str | None = option(
        "Inference component of a SageMaker endpoint.", rare=True
    )
    target_variant: str | None = option("Variant of a SageMaker endpoint.", rare=True)


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What the levels must meet, and what ends a request, a level or the sweep."""

    GROUP: ClassVar = "Limits"

    slo: tuple[str, ...] = option(
        "SLO such as ttft_p90<=1s; repeatable. Exit 99 if no level meets them all, 2 if unknown.",
        value=(),
    )
    goodput: tuple[str, ...] = option(
        "Limits of a request in ms: ttft:500 tpot:15. Exit 99 if no level has 90 % within them.",
        value=(),
        rare=True,
    )
    failures: str = option(
        "Failed requests in SLOs: exclude, or infinite (as latency).", value="exclude", rare=True
    )
    max_errors: str = option(
        "Maximum share of failed requests before a level is ended: 10%, or none.", value="50%"
    )
    max_time: str | None = option(
        "Maximum time of the sweep: no level starts that would end later. 90s, 10m, or none.",
        default="5m if levels are picked during the sweep, else none",
    )
    max_spend: float | None = option("Maximum cost of the sweep in USD.")
    price_per_hour: float | None = option("Price of the whole target in USD per hour.")
    instance: str | None = option("Instance type behind a URL, for its price in the catalog.")
    timeout: str | None = option(
        "Seconds after which a request fails and the sweep ends, or none.",
        default="none; SageMaker: 480 streaming, 60 without",
    )
    first_token_timeout: float | None = option(
        "Seconds after which a request without a token fails and the sweep ends.", rare=True
    )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The run folder."""

    GROUP: ClassVar = "Run"

    out: Path | None = option("Run folder.", "--out", "-o", default="below runs/")
    resume: bool = option("Continuation of the run in the run folder, if it exists.", value=False)
    name: str | None = option("Name of the run in reports.", rare=True)
    seed: int | None = option("Random seed of lengths, prompts and arrivals.", default="0")
    live: int | None = option(
        "Port of a page on 127.0.0.1 that follows the sweep; none: a free one. Leaves report.html.",
        metavar="[PORT]",
        bare=0,
    )
    step_trace: Path | None = option(STEP_TRACE, rare=True)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The load generator: how it sends, takes its times, and watches the server."""

    GROUP: ClassVar = "Load generator"
    COMMON: ClassVar = ()  # all are under --help-all

    workers: str = option(
        "Number of sending processes, or auto: more when a core is busy.", value="auto"
    )
    timestamps: str | None = option(
        "Clock of the receive times: kernel or user.", default="kernel if available"
    )
    receive: str | None = option(
        "Socket reader: native (C, built at first use), python, or auto.", default="auto"
    )
    retries: str | None = option(
        "Retries of transient failures: aws-standard, as AWS SDKs do.", default="none"
    )
    connections: str | None = option(
        "Connections: reuse (one for each concurrent request), per-request, or a maximum number.",
        default="reuse",
    )
    metrics_url: tuple[str, ...] = option(
        "Metrics page of a replica; repeatable.", value=(), default="the target's"
    )
    cloudwatch_wait: float | None = option(
        "Maximum wait in seconds for CloudWatch after a SageMaker sweep.", default="120"
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The bundled and the simulated engine; plain help lists the settings that COMMON names."""

    COMMON: ClassVar = ("tensor_parallel", "dtype", "max_rolling_batch_size", "profile")

    model: ModelOptions = field(default_factory=ModelOptions)
    batching: BatchingOptions = field(default_factory=BatchingOptions)


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """A sweep: options override the scenario file, which overrides the defaults."""

    target: TargetSettings = field(default_factory=TargetSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    load: LoadSettings = field(default_factory=LoadSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    run: RunSettings = field(default_factory=RunSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    client: ClientSettings = field(default_factory=ClientSettings)

    def overrides(self) -> dict[str, Any]:
        """The stated settings by their dotted names in the scenario."""
        found = self.load.axes()
        groups = (self.run, self.target, self.workload, self.load, self.sessions, self.limits)
        for name, value in (each for group in (*groups, self.client) for each in values_of(group)):
            if name in _SCENARIO_NAMES and value not in (None, ()):
                read = _READERS.get(name)
                found[_SCENARIO_NAMES[name]] = value if read is None else read(value)
        engine = stated_settings(self.engine.model, self.engine.batching)
        return found | {f"engine.{name}": value for name, value in engine.items()}

    def beside_scenario(self) -> list[str]:
        """Names of the stated settings that a scenario cannot hold."""
        stated = {
            "header": bool(self.target.header),
            "workers": self.client.workers not in ("auto", "1"),
            "cloudwatch_wait": self.client.cloudwatch_wait is not None,
            "step_trace": self.run.step_trace is not None,
        }
        return [name for name, given in stated.items() if given]


def read_timeout(text: str) -> float | str:
    """Seconds, or the word none, as a scenario takes them."""
    try:
        return text if text == "none" else float(text)
    except ValueError:
        raise InputError(f"--timeout: {text!r} is neither a number of seconds nor none") from None


_SCENARIO_NAMES: Final = {
    **{name: name for name in ("name", "seed", "target", "model", "protocol", "stream", "slo")},
    "timeout": "timeout_s",
    "sagemaker_endpoint_url": "sagemaker.endpoint_url",
    "inference_component": "sagemaker.inference_component",
    "target_variant": "sagemaker.target_variant",
    **{each.name: f"workload.{each.name}" for each in fields(WorkloadSettings)},
    "turns": "workload.turns",
    **{name: f"workload.{name}" for name in ("conversations", "agents", "agent_trace")},
    "idle_cap": "workload.idle_cap_s",
    "begins_within": "workload.begins_within",
    "think_time": "workload.think_s",
    **{each.name: f"load.{each.name}" for each in fields(LoadSettings) if each.name not in AXES},
    "ramp": "load.ramp_s",
    "duration": "load.duration_s",
    **{name: f"load.{name}" for name in ("sessions_per_level", "max_sessions", "max_in_flight")},
    **{name: f"client.{name}" for name in ("timestamps", "receive", "retries", "connections")},
    "first_token_timeout": "client.first_token_timeout_s",
}
"""Dotted name in the scenario of each setting that a scenario can hold."""
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "mix": parse_mix,
    "dataset": str,
    "trace": str,
    "conversations": str,
    "agents": lambda text: "" if text == "default" else text,
    "agent_trace": str,
    "speed": partial(numbers, "--speed"),
    "timeout": read_timeout,
    "connections": lambda text: int(text) if text.isdecimal() else text,
}


def read_workers(text: str) -> int | Literal["auto"]:
    """A number of processes or auto; raises InputError for anything else."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--workers: write a number of processes or auto, got {text!r}")
    return int(text)
