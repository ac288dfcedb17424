"""Settings of `sweep`: the target, the limits, the run folder, the load generator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from lmi_bench.core import scenario_fields
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option, Stated, option, overrides, stated
from lmi_bench.core.scenario_fields import ClientFields, TopFields
from lmi_bench.jobs.settings.engine import BATCHING, MODEL, STEP_TRACE, stated_settings

API_KEY: Final = Option(
    "Key sent as a bearer token, to Anthropic's API as x-api-key; never written to a file.", envvar="LMI_BENCH_API_KEY"
)

HEADER: Final = Option("Header of every request, 'Name: value'; repeatable.", ("--header", "-H"))


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The target that is measured, and its protocol.

    scenario  Scenario file, URL, sagemaker:NAME, or sim:INSTANCE to simulate.
    matrix  File of targets and payloads: every payload on every target, one report.
    against  Second target: levels alternate between both until a difference is sure (--until).
    """

    GROUP: ClassVar = "Target"

    scenario: str | None = option(argument=True, metavar="[SCENARIO.yaml|TARGET]", group="Arguments")
    matrix: Path | None = option()
    against: str | None = option(metavar="TARGET", rare=True)
    target: Stated = Stated(TopFields, ("target", "model", "protocol"))
    api_key: str | None = option(API_KEY)
    header: tuple[str, ...] = option(HEADER, value=())
    stream: Stated = Stated(TopFields, ("stream",))
    sagemaker: Stated = Stated(scenario_fields.SageMakerFields)


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What the levels must meet, and what ends a request, a level or the sweep.

    goodput  Limits of a request in ms: ttft:500 tpot:15. Exit 99 if no level has 90 % within them.
    failures  Failed requests in SLOs: exclude, or infinite (as latency).
    max_errors  Maximum share of failed requests before a level is ended: 10%, or none.
    max_time  Maximum time of the sweep: no level starts that would end later. 90s, 10m, or none.
    max_spend  Maximum cost of the sweep in USD.
    price_per_hour  Price of the whole target in USD per hour.
    instance  Instance type behind a URL, for its price in the catalog.
    """

    GROUP: ClassVar = "Limits"

    slo: Stated = Stated(TopFields, ("slo",))
    goodput: tuple[str, ...] = option(value=(), rare=True)
    failures: str = option(value="exclude", rare=True)
    max_errors: str = option(value="50%")
    max_time: str | None = option(default="5m if levels are picked during the sweep, else none")
    max_spend: float | None = option()
    price_per_hour: float | None = option()
    instance: str | None = option()
    timeout: Stated = Stated(TopFields, ("timeout_s",))
    first_token: Stated = Stated(ClientFields, ("first_token_timeout_s",))


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The run folder.

    measure_startup  Command that starts the server, twice: its cold and warm start are timed.
    """

    GROUP: ClassVar = "Run"

    out: Path | None = option("Run folder.", "--out", "-o", default="below runs/")
    resume: bool = option("Continuation of the run in the run folder, if it exists.", value=False)
    named: Stated = Stated(TopFields, ("name", "seed"))
    live: int | None = option(
        "Port of a page on 127.0.0.1 that follows the sweep; none: a free one. Leaves report.html.",
        metavar="[PORT]",
        bare=0,
    )
    step_trace: Path | None = option(STEP_TRACE, rare=True)
    measure_startup: str | None = option(metavar="CMD", rare=True)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The load generator: how it sends, takes its times, and watches the server.

    workers  Number of sending processes, or auto: more when a core is busy.
    hosts    Hosts that send, with commas: local, USER@HOST (ssh) or join (dials in); NAME*4 for 4.
    ray      Address of a Ray cluster, or auto: a worker on each of its nodes dials in.
    listen   Address for hosts that join.
    metrics_url  Metrics page of a replica, or file of its spans (OTLP/JSON); repeatable.
    cloudwatch_wait  Maximum wait in seconds for CloudWatch after a SageMaker sweep.
    """

    GROUP: ClassVar = "Load generator"
    COMMON: ClassVar = ()  # all are under --help-all

    workers: str = option(value="auto")
    hosts: str | None = option(default="this one")
    ray: str | None = option(metavar="ADDRESS")
    listen: str = option(value="127.0.0.1:7711")
    sending: Stated = Stated(
        ClientFields,
        (
            *("timestamps", "receive", "retries", "connections"),
            *("adapters", "session_header", "reset_prefix_cache", "priority"),
            *("cacert", "insecure"),
        ),
    )
    metrics_url: tuple[str, ...] = option(value=(), default="the target's")
    cloudwatch_wait: float | None = option(default="120")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The bundled and the simulated engine; plain help lists the settings that COMMON names."""

    COMMON: ClassVar = ("tensor_parallel", "dtype", "max_rolling_batch_size", "profile")

    model: Stated = MODEL
    batching: Stated = BATCHING


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """A sweep: options override the scenario file, which overrides the defaults."""

    target: TargetSettings = field(default_factory=TargetSettings)
    workload: Stated = Stated(scenario_fields.WorkloadFields)
    sessions: Stated = Stated(scenario_fields.SessionFields)
    session_load: Stated = Stated(scenario_fields.SessionLoadFields)
    load: Stated = Stated(scenario_fields.LoadFields)
    limits: LimitSettings = field(default_factory=LimitSettings)
    run: RunSettings = field(default_factory=RunSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    client: ClientSettings = field(default_factory=ClientSettings)

    def overrides(self) -> dict[str, Any]:
        """The stated settings by their dotted names in the scenario."""
        check_lengths(self.workload.values)
        engine = stated_settings(self.engine)
        return _with_axes(overrides(self)) | {f"engine.{name}": engine[name] for name in engine}

    def beside_scenario(self) -> list[str]:
        """Names of the stated settings that a scenario cannot hold."""
        beside = ("header", "workers", "hosts", "ray", "cloudwatch_wait", "step_trace")
        found = [each.name for each in stated(self) if each.name in beside]
        return [name for name in found if name != "workers" or self.client.workers != "1"]


def check_lengths(workload: Mapping[str, Any]) -> None:
    """Raise InputError for lengths that the stated options give twice."""
    for flag, fixed, drawn in (
        ("--isl", "input_tokens", "input_lengths"),
        ("--osl", "output_tokens", "output_lengths"),
    ):
        for name in (drawn, "mix", "trace"):
            if fixed in workload and name in workload:
                raise InputError(
                    f"{flag} {workload[fixed]} and --{name.replace('_', '-')} {workload[name]} "
                    "both state lengths: leave one out"
                )


def _with_axes(found: dict[str, Any]) -> dict[str, Any]:
    """The stated settings, where those of the load mean something else beside each other.

    A concurrency beside a rate caps the requests in flight. An infinite rate, other tools'
    word for none, is left out. Burstiness is of gamma arrivals.
    """
    rate, users = found.get("load.rate_per_s"), found.get("load.concurrency")
    if rate is not None and float("inf") in rate:
        if len(rate) > 1 or users is None:
            raise InputError(
                "--rate inf is no rate: to send all at once give --concurrency N alone, else requests per second"
            )
        del found["load.rate_per_s"]
    elif rate is not None and users is not None:
        if users == "auto" or len(users) > 1:
            raise InputError(
                "--rate with --max-concurrency caps the requests in flight: give one number, "
                f"got {users if users == 'auto' else ','.join(map(str, users))}"
            )
        del found["load.concurrency"]
        found.setdefault("load.max_in_flight", users[0])
    if "load.burstiness" in found:
        found.setdefault("load.arrivals", "gamma")
    return found


def read_workers(text: str) -> int | Literal["auto"]:
    """A number of processes or auto; raises InputError for anything else."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--workers: write a number of processes or auto, got {text!r}")
    return int(text)
