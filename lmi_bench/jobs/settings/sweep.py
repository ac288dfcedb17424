"""What `sweep` needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.engine import BatchingOptions, ModelOptions, stated_settings
from lmi_bench.jobs.settings.load import LoadSettings, SessionSettings, WorkloadSettings


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What is measured, and how it is spoken to."""

    GROUP: ClassVar = "Target"

    scenario: Annotated[
        str | None,
        Option(
            "Scenario file, URL, sagemaker:NAME, or sim:INSTANCE to simulate.",
            argument=True,
            metavar="[SCENARIO.yaml|TARGET]",
            group="Arguments",
        ),
    ] = None
    matrix: Annotated[
        Path | None,
        Option("File of targets and payloads: every payload on every target, one report."),
    ] = None
    target: Annotated[
        str | None,
        Option(
            "Target: engine (bundled, this machine), sim:INSTANCE (virtual time), a URL, or "
            "sagemaker:NAME.",
            ("--target", "--base-url"),
            default="engine",
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "Model: a catalog name, a folder, or the name that the endpoint knows.",
            ("--model", "-m"),
            default="the endpoint's; else demo-15m",
        ),
    ] = None
    protocol: Annotated[
        str | None,
        Option(
            "Protocol of an endpoint: openai, openai-chat, lmi or tgi.", default="found by asking"
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Option("Key sent as a bearer token; never written to a file.", envvar="LMI_BENCH_API_KEY"),
    ] = None
    header: Annotated[
        tuple[str, ...],
        Option("Header of every request, 'Name: value'; repeatable.", ("--header", "-H")),
    ] = ()
    stream: Annotated[
        bool | None,
        Option(
            "Answers: streamed, or whole, of which only the total time is known.",
            ("--stream/--no-stream",),
            default="streamed",
        ),
    ] = None
    sagemaker_endpoint_url: Annotated[
        str | None,
        Option("URL of a SageMaker runtime that is not at AWS.", rare=True),
    ] = None
    inference_component: Annotated[
        str | None, Option("Inference component of a SageMaker endpoint.", rare=True)
    ] = None
    target_variant: Annotated[str | None, Option("Variant of a SageMaker endpoint.", rare=True)] = (
        None
    )

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

    slo: Annotated[
        tuple[str, ...],
        Option("SLO such as ttft_p90<=1s; repeatable. Exit 99 if no level meets them all."),
    ] = ()
    goodput: Annotated[
        tuple[str, ...],
        Option(
            "Limits of a single request in ms, as vLLM writes them: ttft:500 tpot:15. Without "
            "--slo exit 99 if no level has 90 % of its requests within them.",
            rare=True,
        ),
    ] = ()
    failures: Annotated[
        str,
        Option("Failed requests in SLOs: exclude, or infinite latency.", rare=True),
    ] = "exclude"
    max_errors: Annotated[
        str,
        Option("Largest share of failed requests; beyond it a level ends: 10%, or none."),
    ] = "50%"
    max_time: Annotated[
        str | None,
        Option(
            "Longest time of the sweep: no level begins that would end later. 90s, 10m, or none.",
            default="5m where levels are picked as the sweep goes, else none",
        ),
    ] = None
    max_spend: Annotated[float | None, Option("Largest cost of the sweep in USD.")] = None
    price_per_hour: Annotated[
        float | None, Option("Price of the whole target in USD per hour.")
    ] = None
    instance: Annotated[
        str | None, Option("Instance type that a URL runs on; its price is the catalog's.")
    ] = None
    timeout: Annotated[
        str | None,
        Option(
            "Seconds after which a request fails and the sweep ends, or none.",
            default="none; SageMaker: 480 streaming, 60 without",
        ),
    ] = None
    first_token_timeout: Annotated[
        float | None,
        Option(
            "Seconds after which a request without a token fails and the sweep ends.", rare=True
        ),
    ] = None

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

    out: Annotated[Path | None, Option("Run folder.", ("--out", "-o"), default="below runs/")] = (
        None
    )
    resume: Annotated[
        bool, Option("Resumption where the run folder ends, if it exists.", ("--resume",))
    ] = False
    name: Annotated[str | None, Option("Name of the run in reports.")] = None
    seed: Annotated[
        int | None, Option("Random seed of lengths, prompts and arrivals.", default="0")
    ] = None
    step_trace: Annotated[
        Path | None,
        Option("File for a Chrome trace of the engine's steps and requests.", rare=True),
    ] = None


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The load generator: how it sends, takes its times, and watches the server."""

    GROUP: ClassVar = "Load generator"

    workers: Annotated[
        str,
        Option(
            "Number of processes that send to an endpoint, or auto: more when a core is nearly "
            "full.",
            rare=True,
        ),
    ] = "auto"
    timestamps: Annotated[
        str | None,
        Option(
            "Clock of the receive times: kernel or user.",
            default="kernel where there is one",
            rare=True,
        ),
    ] = None
    receive: Annotated[
        str | None,
        Option(
            "Reader of the sockets: native (C, built at first use), python, or auto.",
            default="auto",
            rare=True,
        ),
    ] = None
    retries: Annotated[
        str | None,
        Option(
            "Retries of transient failures: aws-standard, as AWS SDKs do.",
            default="none",
            rare=True,
        ),
    ] = None
    connections: Annotated[
        str | None,
        Option(
            "Connections: reuse (kept open, one for each request at once), per-request (a new one "
            "each), or their largest number.",
            default="reuse",
            rare=True,
        ),
    ] = None
    metrics_url: Annotated[
        tuple[str, ...],
        Option(
            "Prometheus page of a replica; repeatable.", default="the target's /metrics", rare=True
        ),
    ] = ()
    cloudwatch_wait: Annotated[
        float | None,
        Option(
            "Longest wait for CloudWatch's last minutes after a sweep of SageMaker, in seconds.",
            default="120",
            rare=True,
        ),
    ] = None

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
