"""`lmi-bench report`: one self-contained HTML page about one or more sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders written by `sweep`.")],
    recommendation: Annotated[
        list[Path] | None,
        typer.Option(help="A file written by `recommend --json`; repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file.")] = Path("report.html"),
) -> None:
    """Write one HTML page with curves, knees, levels and recommendations; it needs no network."""
    import json

    from lmi_bench.cli.console import say
    from lmi_bench.errors import InputError
    from lmi_bench.report.html import render_html
    from lmi_bench.report.view import build_view
    from lmi_bench.run_store import load_run

    recommendations = []
    for path in recommendation or ():
        try:
            recommendations.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as exc:
            raise InputError(
                f"{path} cannot be read as a recommendation ({exc}): give a file written by "
                "`lmi-bench recommend --json FILE`"
            ) from exc
    page = render_html(build_view([load_run(path) for path in runs], recommendations))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(out.name + ".new")
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(out)
    except OSError as exc:
        raise InputError(f"cannot write {out}: {exc.strerror}") from exc
    say(f"report: {out} ({len(runs)} sweep(s), {len(recommendations)} recommendation(s))")
