"""What `export` and `import` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """A run and the format to write it in."""

    run: Annotated[Path, Option("Run folder, written by `sweep` or `import`.", argument=True)]
    export_format: Annotated[
        str, Option("Format: csv, parquet, json or llm-d (report 0.2).", ("--format", "-f"))
    ] = "csv"
    out: Annotated[
        Path | None, Option("Folder for the files.", ("--out", "-o"), default="RUN-export")
    ] = None


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Files of another tool, and what they leave out."""

    files: Annotated[
        tuple[Path, ...],
        Option(
            "Results of vllm bench serve, SGLang, AIPerf, genai-perf, guidellm, genai-bench, "
            "llmperf, llmeter, inference-perf, evalscope, InferenceX, awscurl or llm-d; several "
            "files make several levels.",
            argument=True,
        ),
    ]
    out: Annotated[Path, Option("Run folder to make.", ("--out", "-o"))]
    concurrency: Annotated[
        int | None, Option("Users of the level, where the file does not say.")
    ] = None
    rate: Annotated[
        float | None, Option("Rate of the level in req/s, where the file does not say.")
    ] = None
