"""`lmi-bench sweep`: measure a target over concurrency or request rate."""

import functools
import os
from typing import TYPE_CHECKING, Annotated

import typer

from lmi_bench.cli.command import ENDING, spread_options
from lmi_bench.cli.console import Terminal, note, run_job, show_result
from lmi_bench.core import errors
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.sweep import API_KEY, HEADER, SweepSettings

if TYPE_CHECKING:
    from lmi_bench.jobs.matrix import MatrixResult
    from lmi_bench.jobs.sweep.against import Contest
    from lmi_bench.jobs.sweep.result import SweepResult


@spread_options
def sweep(settings: SweepSettings) -> None:
    """Measure a target over concurrency or request rate: curves, knee, and a run folder.

    Options override the scenario file, which overrides the defaults.
    """
    if ENDING.ignores_ctrl_c:
        note(f"Ctrl-C is ignored, as in a background job: `kill {os.getpid()}` ends the sweep")
    outcome = _sweep(settings)
    codes = {"missed": errors.EXIT_SLO_MISSED, "not measured": errors.EXIT_BAD_INPUT}
    code = errors.EXIT_FAILED if outcome.failed else codes.get(outcome.slo_outcome or "", 0)
    if code := ENDING.code if outcome.interrupted else code:
        raise typer.Exit(code)


@spread_options
def worker(
    connect: Annotated[str | None, Option("Address of a sweep whose --hosts has join.")] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    header: Annotated[tuple[str, ...], HEADER] = (),
) -> None:
    """Send a share of a sweep's levels; `sweep --hosts` starts it, or it dials in."""
    from lmi_bench.jobs.worker import work

    work(connect, api_key, header, note)


def _sweep(settings: SweepSettings) -> "SweepResult | MatrixResult | Contest":
    from lmi_bench.cli.sweep_print import print_cell, print_changes, print_matrix, print_sweep
    from lmi_bench.jobs.matrix import run_matrix
    from lmi_bench.jobs.sweep.run import sweep as run

    if settings.target.against is not None:
        from lmi_bench.jobs.sweep.against import sweep_against

        contest = run_job(sweep_against, settings)
        print_changes(contest)
        show_result(contest.to_json())
        return contest
    if settings.target.matrix is None:
        result = run_job(run, settings)
        print_sweep(result)
        show_result(result.to_json())
        return result
    with Terminal() as listener:
        cells = run_matrix(settings, listener, functools.partial(print_cell, listener))
    print_matrix(cells)
    return cells
