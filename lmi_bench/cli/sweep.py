"""`lmi-bench sweep`: measure a target over concurrency or request rate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SLO_MISSED, EXIT_TERMINATED
from lmi_bench.jobs.settings.sweep import SweepSettings

if TYPE_CHECKING:
    from lmi_bench.jobs.matrix import MatrixResult
    from lmi_bench.jobs.sweep.result import SweepResult


@spread_options
def sweep(settings: SweepSettings) -> None:
    """Measure a target over concurrency or request rate: curves, knee, and a run folder.

    Options win over the scenario file, which wins over the defaults.
    """
    from lmi_bench.cli.termination import termination_as_interrupt

    with termination_as_interrupt() as is_terminated:
        try:
            outcome = _sweep(settings) if settings.target.matrix is None else _matrix(settings)
        except KeyboardInterrupt:  # before the run had a folder
            if not is_terminated():
                raise
            raise typer.Exit(EXIT_TERMINATED) from None
    if outcome.interrupted:
        raise typer.Exit(EXIT_TERMINATED if is_terminated() else EXIT_INTERRUPTED)
    if outcome.failed:
        raise typer.Exit(EXIT_FAILED)
    if outcome.slo_missed:
        raise typer.Exit(EXIT_SLO_MISSED)


def _sweep(settings: SweepSettings) -> SweepResult:
    from lmi_bench.cli.console import terminal
    from lmi_bench.cli.sweep_print import print_sweep
    from lmi_bench.jobs.sweep.run import sweep as run

    with terminal() as listener:
        result = run(settings, listener)
    print_sweep(result)
    return result


def _matrix(settings: SweepSettings) -> MatrixResult:
    from lmi_bench.cli.console import terminal
    from lmi_bench.cli.matrix_print import print_cell, print_matrix
    from lmi_bench.jobs.matrix import run_matrix

    with terminal() as listener:
        result = run_matrix(settings, listener, functools.partial(print_cell, listener))
    print_matrix(result)
    return result
