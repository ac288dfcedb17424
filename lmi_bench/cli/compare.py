"""`lmi-bench compare`: is run B faster than run A, beyond chance?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run folder to compare with.")],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run folder that is judged.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the differences here.")
    ] = None,
) -> None:
    """Compare two runs of one workload level by level: faster, slower or no difference.

    Intervals are 95 % by paired bootstrap over requests. Unlike workloads are refused.
    """
    from lmi_bench.jobs.compare import run_compare

    run_compare(a, b, json_file=json_file)
