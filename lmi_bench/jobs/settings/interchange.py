"""What `export` and `import` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import REQUIRED, option


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """A run and the format to write it in."""

    run: Path = option("Run folder, written by `sweep` or `import`.", value=REQUIRED, argument=True)
    export_format: str = option(
        "Format: csv, parquet, json or llm-d (report 0.2).", "--format", "-f", value="csv"
    )
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
    out: Path = option("Run folder to make.", "--out", "-o", value=REQUIRED)
    concurrency: int | None = option("Users of the level, where the file does not say.")
    rate: float | None = option("Rate of the level in req/s, where the file does not say.")
