"""The command `lmi-bench`: its commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from lmi_bench import __version__
from lmi_bench.cli.calibrate import calibrate
from lmi_bench.cli.command import Command
from lmi_bench.cli.compare import compare
from lmi_bench.cli.compare_accelerators import compare_accelerators
from lmi_bench.cli.compile import compile_steps
from lmi_bench.cli.convert import convert
from lmi_bench.cli.deploy import deploy
from lmi_bench.cli.gate import gate
from lmi_bench.cli.generate import generate
from lmi_bench.cli.interchange import export, import_results
from lmi_bench.cli.optimize import optimize
from lmi_bench.cli.perplexity import perplexity
from lmi_bench.cli.plan_day import plan_day
from lmi_bench.cli.predict import predict
from lmi_bench.cli.profile import profile
from lmi_bench.cli.recommend import recommend
from lmi_bench.cli.report import report
from lmi_bench.cli.serve import serve
from lmi_bench.cli.sweep import sweep
from lmi_bench.cli.validate import validate
from lmi_bench.cli.verify import verify
from lmi_bench.cli.workload import workload
from lmi_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, LmiBenchError
from lmi_bench.core.slo import join_goodput

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = typer.Typer(
    name="lmi-bench",
    help="Measure LLM endpoints, find their knee, plan instance, TP degree, replicas and price.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(sweep)
app.command()(recommend)
app.command()(verify)
app.add_typer(workload)
app.command()(plan_day)
app.command()(compare_accelerators)
app.command()(report)
app.command()(compare)
app.command()(gate)
app.command()(export)
app.command("import")(import_results)
app.command()(serve)
app.add_typer(deploy)
app.add_typer(profile)
app.command()(generate)
app.command()(optimize)
app.command("compile")(compile_steps)
app.command()(convert)
app.command()(perplexity)
app.command()(predict)
app.command()(calibrate)
app.command()(validate)
for _group in (app, workload, deploy, profile):
    for _command in _group.registered_commands:
        _command.cls = Command


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmi-bench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line; what a user can mend ends in one line on stderr."""
    try:
        app(join_goodput(sys.argv[1:]))
    except LmiBenchError as exc:
        typer.echo(f"error: {exc}", err=True)
        sys.exit(exc.exit_code)
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise
        where = f"cannot write {exc.filename}: " if exc.filename else ""
        typer.echo(f"error: {where}{exc.strerror}; make room and try again", err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
