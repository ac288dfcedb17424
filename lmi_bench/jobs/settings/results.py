"""Settings of the commands on results: report, compare, gate, export, import, workload from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, Option, Settings, option

PROMETHEUS: Final = "prometheus:"
_RUN: Final = Option("Run folder, written by `sweep` or `import`.", argument=True)


_HOURS: Final = 24.0


@dataclass(frozen=True, slots=True)
class ReportSettings(Settings):
    """Results, and the files to write about them."""

    runs: tuple[Path, ...] = option("Run folders, written by `sweep`.", value=(), argument=True, metavar="[RUN_DIR]...")
    recommendation: tuple[Path, ...] = option("File written by `recommend --json`; repeatable.", value=())
    label: tuple[str, ...] = option("Label of a run, in the order of the runs; repeatable.", value=())
    title: str = option("Title of the page.", value="")
    figures: Path | None = option("Folder for the curves as pictures.")
    figure_format: str = option("Format of the pictures: png, svg or pdf.", value="png")
    markdown: Path | None = option("File for the tables as Markdown.")
    repair: bool = option(
        "Runs that a power loss tore: written whole first, the old files kept beside.", value=False, rare=True
    )
    out: Path = option("HTML file.", "--out", "-o", value=Path("report.html"))

    def _check(self) -> None:
        if self.figures is None and self.figure_format != "png":
            raise InputError("--figure-format is for pictures: add --figures FOLDER")


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """Two runs of one workload."""

    a: Path = option("Run folder to compare with.", value=REQUIRED, argument=True, metavar="RUN_A")
    b: Path = option("Run folder that is judged.", value=REQUIRED, argument=True, metavar="RUN_B")


@dataclass(frozen=True, slots=True)
class GateSettings:
    """A run, what it must meet, and the files for the verdict."""

    run: Path = option(_RUN, value=REQUIRED)
    slo: tuple[str, ...] = option(
        "SLO such as ttft_p90<=1s; repeatable.", value=(), default="those of the run's scenario"
    )
    at: tuple[float, ...] = option("Load to judge, in users or req/s; repeatable.", value=(), default="every level")
    failures: str = option("Failed requests in SLOs: exclude, or infinite (as latency).", value="exclude")
    baseline: Path | None = option("Earlier run of the same workload.")
    rules: str | None = option("Public rules under which the run should count: agentx.")
    max_regression: str | None = option(
        "Maximum share by which a metric may be worse than the baseline's.", default="5%"
    )
    junit: Path | None = option("File for the verdict as JUnit XML.")
    markdown: Path | None = option("File for the verdict as Markdown.")


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """A run and the format to write it in."""

    run: Path = option(_RUN, value=REQUIRED)
    export_format: str = option("Format: csv, parquet, json or llm-d (report 0.2).", "--format", "-f", value="csv")
    out: Path | None = option("Folder for the files.", "--out", "-o", default="RUN-export")


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Files of another tool, and what they leave out."""

    files: tuple[Path, ...] = option(
        "Results of vllm bench serve, SGLang, AIPerf, genai-perf, guidellm, genai-bench, "
        "llmperf, llmeter, inference-perf, evalscope, InferenceX, awscurl or llm-d; several "
        "files make several levels.",
        value=REQUIRED,
        argument=True,
    )
    out: Path = option("New run folder.", "--out", "-o", value=REQUIRED)
    concurrency: int | None = option("Users of the level, in place of what the file states.")
    rate: float | None = option("Rate of the level in req/s, if the file does not state it.")


@dataclass(frozen=True, slots=True)
class WorkloadFromSettings(Settings):
    """A source of traffic and the scenario to write.

    source  Log: JSON lines or CSV (also of LiteLLM, Langfuse, Azure's and Mooncake's traces), or an
        access log of nginx or a load balancer; .gz too. Or prometheus:URL of a Prometheus server or
        of an engine's /metrics page.
    out  Scenario file to write (YAML).
    model  Model for the scenario.
    fields  Names of a log's fields, such as time=startTime,input=usage.prompt,output=usage.answer.
    assume  Prompt/answer length in tokens, such as 500/200, for requests that the log has none of.
    hours  Period in hours, up to now, to read from a Prometheus server.
    speed  Growth factor: the scenario's rate is the peak rate times it.
    """

    source: str = option(value=REQUIRED, argument=True, metavar="SOURCE")
    out: Path = option("--out", "-o", value=REQUIRED)
    model: str | None = option("--model", "-m")
    fields: str | None = option(default="the usual names")
    assume: str | None = option()
    hours: float = option(value=_HOURS, must="at least 0.1")
    speed: float = option(value=1.0, must="above 0")

    def _check(self) -> None:
        if self.source.startswith(PROMETHEUS) and (self.fields or self.assume):
            raise InputError("--fields and --assume are for logs: metrics state their own lengths")
        if self.hours != _HOURS and not self.source.startswith(PROMETHEUS):
            raise InputError("--hours is for a Prometheus server: a log is read whole")
