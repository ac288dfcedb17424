"""The command `lmi-bench`: its commands, and how an error becomes one line and an exit code."""

import errno
import os
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lmi_bench import __version__
from lmi_bench.cli import bundled, plan, results, setup, sweep
from lmi_bench.cli.command import ENDING, Command
from lmi_bench.cli.deploy import deploy
from lmi_bench.core import errors
from lmi_bench.core.durable import write_text
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.slo import join_goodput

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_A_PATH = (
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENXIO, errno.ENODEV, errno.EIO, errno.ESTALE),  # a disk, a socket
)

app = typer.Typer(
    name="lmi-bench",
    help="Measure LLM endpoints, find their knee, plan instance, TP degree, replicas and price.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    *(setup.doctor, setup.selftest, setup.init, sweep.sweep),
    *(plan.recommend, plan.verify, plan.plan_day),
    *(plan.compare_accelerators, results.report, results.compare, results.gate, results.export),
    *(results.import_results, bundled.serve, bundled.generate, bundled.optimize),
    *(bundled.compile_steps, bundled.convert, bundled.perplexity),
    *(plan.predict, plan.calibrate, plan.validate),
)
_OTHER_NAMES = {"import_results": "import", "compile_steps": "compile"}  # Python's own words
for _command in _COMMANDS:
    _name = _command.__name__
    app.command(_OTHER_NAMES.get(_name, _name.replace("_", "-")), cls=Command)(_command)
app.command(hidden=True)(sweep.worker)
for _group in (setup.catalog, setup.profiles, setup.explain, results.workload, deploy, bundled.profile):
    app.add_typer(_group)
    for _info in _group.registered_commands:
        _info.cls = Command


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmi-bench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line; what a user can mend ends in one line on stderr."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        app(join_goodput(sys.argv[1:]))
    except errors.LmiBenchError as exc:
        typer.echo(f"error: {exc}", err=True)
        sys.exit(exc.exit_code)
    except OSError as exc:
        if exc.errno in _OF_A_PATH and exc.filename:
            typer.echo(f"error: {exc.filename!s:.100}: {exc.strerror}; name another", err=True)
            sys.exit(errors.EXIT_BAD_INPUT)
        if exc.errno not in _NO_ROOM:
            _fail_unexpectedly(exc)
        where = f"cannot write {exc.filename}: " if exc.filename else ""
        typer.echo(f"error: {where}{exc.strerror}; make room and try again", err=True)
        sys.exit(errors.EXIT_FAILED)
    except SystemExit:
        raise
    except BaseException as exc:  # noqa: BLE001 - the last resort, also for a panic in Rust
        _fail_unexpectedly(exc)


def _fail_unexpectedly(exc: BaseException) -> NoReturn:
    """End with one line; the traceback goes to a file, with LMI_BENCH_DEBUG=1 to stderr."""
    import traceback

    if errors.is_ctrl_c(exc):
        typer.echo(ENDING.word, err=True)
        sys.exit(ENDING.code)
    trace = redact_text("".join(traceback.format_exception(exc)))
    text = str(exc) or "not enough memory" * isinstance(exc, MemoryError)
    what = redact_text(f"{type(exc).__name__}: {text}").partition("\n")[0]
    what = f"{what}: a fault of lmi-bench, please report it; its trace is {_keep(trace)}"
    typer.echo(f"error: internal error: {what}", err=True)
    sys.exit(errors.EXIT_FAILED)


def _keep(trace: str) -> str:
    """Write it beside the run, or print it if that is wanted; says where it is."""
    if os.environ.get("LMI_BENCH_DEBUG"):
        typer.echo(trace, err=True)
        return "above"
    outs = (Path(value).parent for name, value in pairwise(sys.argv) if name in ("--out", "-o"))
    file = next(outs, Path()) / f"lmi-bench-error-{os.getpid()}.txt"
    try:
        write_text(file, trace)
    except errors.InputError:
        return f"shown with LMI_BENCH_DEBUG=1: {file} could not be written"
    return f"in {file}"
