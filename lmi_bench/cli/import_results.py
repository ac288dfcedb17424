"""`lmi-bench import`: results of other tools as a run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def import_results(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Results of vllm bench serve, SGLang, AIPerf, genai-perf, guidellm, genai-bench, "
            "llmperf, llmeter, inference-perf, evalscope, InferenceX, awscurl or llm-d; several "
            "make several levels."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder to make.")],
    concurrency: Annotated[
        int | None, typer.Option(help="Users of the level, where the file does not say.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, where the file does not say.")
    ] = None,
) -> None:
    """Make a run folder of other tools' results: formulas are mapped, not names.

    A metric that the file does not have by our formula stays empty, with the reason.
    """
    from lmi_bench.cli.console import note, say
    from lmi_bench.interchange.imports.level import Load
    from lmi_bench.interchange.imports.read import read_results
    from lmi_bench.interchange.imports.run_folder import write_imported

    load = None if concurrency is None and rate is None else Load(concurrency, rate)
    parts = [read_results(path, load) for path in files]
    for text in sorted({text for part in parts for text in part.notes}):
        note(text)
    number = write_imported(parts, out, command=["lmi-bench", *sys.argv[1:]])
    say(f"{out}: {number} level(s) of {parts[0].tool}   next: lmi-bench report {out}")
