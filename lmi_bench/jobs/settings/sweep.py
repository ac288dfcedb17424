"""What `sweep` needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option
from lmi_bench.jobs.settings.engine import BatchingOptions, ModelOptions, stated_settings
from lmi_bench.jobs.settings.load import LoadSettings, SessionSettings, WorkloadSettings


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What is measured, and how it is spoken to."""

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
        "Protocol of an endpoint: openai, openai-chat, lmi or tgi.", default="found by asking"
    )
    api_key: str | None = option(
        "Key sent as a bearer token; never written to a file.", envvar="LMI_BENCH_API_KEY"
    )
    header: tuple[str, ...] = option(
        "Header of every request, 'Name: value'; repeatable.", "--header", "-H", value=()
    )
    stream: bool | None = option(
        "Answers: streamed, or whole, of which only the total time is known.",
        "--stream/--no-stream",
        default="streamed",
    )
    sagemaker_endpoint_url: str | None = option(
        "URL of a SageMaker runtime that is not at AWS.", rare=True
    )
    inference_component: str | None = option(
        "Inference component of a SageMaker endpoint.", rare=True
    )
    target_variant: str | None = option("Variant of a SageMaker endpoint.", rare=True)

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was stated."""
        return {
            "model": self.model,
            "target": self.target,
            "protocol": self.protocol,
            "stream": self.stream,
            "sagemaker.endpoint_url": self.sagemaker_endpoint_url,
            "sagemaker.inference_component": self.inference_component,
            "sagemaker.target_variant": self.target_variant,
        }


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What the levels must meet, and what ends a request, a level or the sweep."""

    GROUP: ClassVar = "Limits"

    slo: tuple[str, ...] = option(
        "SLO such as ttft_p90<=1s; repeatable. Exit 99 if no level meets them all.", value=()
    )
    goodput: tuple[str, ...] = option(
        "Limits of a single request in ms, as vLLM writes them: ttft:500 tpot:15. Without "
        "--slo exit 99 if no level has 90 % of its requests within them.",
        value=(),
        rare=True,
    )
    failures: str = option(
        "Failed requests in SLOs: exclude, or infinite latency.", value="exclude", rare=True
    )
    max_errors: str = option(
        "Largest share of failed requests; beyond it a level ends: 10%, or none.", value="50%"
    )
    max_time: str | None = option(
        "Longest time of the sweep: no level begins that would end later. 90s, 10m, or none.",
        default="5m where levels are picked as the sweep goes, else none",
    )
    max_spend: float | None = option("Largest cost of the sweep in USD.")
    price_per_hour: float | None = option("Price of the whole target in USD per hour.")
    instance: str | None = option("Instance type that a URL runs on; its price is the catalog's.")
    timeout: str | None = option(
        "Seconds after which a request fails and the sweep ends, or none.",
        default="none; SageMaker: 480 streaming, 60 without",
    )
    first_token_timeout: float | None = option(
        "Seconds after which a request without a token fails and the sweep ends.", rare=True
    )

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was stated."""
        return {
            "slo": self.slo or None,
            "timeout_s": None if self.timeout is None else read_timeout(self.timeout),
            "client.first_token_timeout_s": self.first_token_timeout,
        }


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The run folder."""

    GROUP: ClassVar = "Run"

    out: Path | None = option("Run folder.", "--out", "-o", default="below runs/")
    resume: bool = option(
        "Resumption where the run folder ends, if it exists.", "--resume", value=False
    )
    name: str | None = option("Name of the run in reports.")
    seed: int | None = option("Random seed of lengths, prompts and arrivals.", default="0")
    step_trace: Path | None = option(
        "File for a Chrome trace of the engine's steps and requests.", rare=True
    )


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The load generator: how it sends, takes its times, and watches the server."""

    GROUP: ClassVar = "Load generator"

    workers: str = option(
        "Number of processes that send to an endpoint, or auto: more when a core is nearly full.",
        value="auto",
        rare=True,
    )
    timestamps: str | None = option(
        "Clock of the receive times: kernel or user.",
        default="kernel where there is one",
        rare=True,
    )
    receive: str | None = option(
        "Reader of the sockets: native (C, built at first use), python, or auto.",
        default="auto",
        rare=True,
    )
    retries: str | None = option(
        "Retries of transient failures: aws-standard, as AWS SDKs do.", default="none", rare=True
    )
    connections: str | None = option(
        "Connections: reuse (kept open, one for each request at once), per-request (a new one "
        "each), or their largest number.",
        default="reuse",
        rare=True,
    )
    metrics_url: tuple[str, ...] = option(
        "Prometheus page of a replica; repeatable.",
        value=(),
        default="the target's /metrics",
        rare=True,
    )
    cloudwatch_wait: float | None = option(
        "Longest wait for CloudWatch's last minutes after a sweep of SageMaker, in seconds.",
        default="120",
        rare=True,
    )

    def fields(self) -> dict[str, Any]:
        """By their dotted names in the scenario; None where nothing was stated."""
        number = self.connections is not None and self.connections.isdecimal()
        return {
            "client.timestamps": self.timestamps,
            "client.receive": self.receive,
            "client.retries": self.retries,
            "client.connections": int(self.connections or 0) if number else self.connections,
        }


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The bundled and the simulated engine; plain help lists the settings that COMMON names."""

    COMMON: ClassVar = ("tensor_parallel", "dtype", "max_rolling_batch_size", "replicas", "profile")

    model: ModelOptions = field(default_factory=ModelOptions)
    batching: BatchingOptions = field(default_factory=BatchingOptions)


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """A sweep: options win over the scenario file, which wins over the defaults."""

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
        sessions = self.sessions.fields().items()
        engine = stated_settings(self.engine.model, self.engine.batching)
        found = {
            "name": self.run.name,
            "seed": self.run.seed,
            **self.target.fields(),
            **self.workload.fields(),
            **self.load.fields(),
            **{name: value for name, value in sessions if value is not None},
            **self.limits.fields(),
            **self.client.fields(),
            **{f"engine.{name}": value for name, value in engine.items()},
        }
        return {name: value for name, value in found.items() if value is not None}

    def beside_scenario(self) -> list[str]:
        """Names of the stated settings that no scenario holds."""
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


def read_workers(text: str) -> int | Literal["auto"]:
    """A number of processes or auto; raises InputError where it is neither."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--workers: write a number of processes or auto, got {text!r}")
    return int(text)
