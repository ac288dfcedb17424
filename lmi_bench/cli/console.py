"""What a person sees: tables on stdout, progress and warnings on stderr; rich is loaded late.

`--output plain` prints tables as lines of tab-separated cells with all columns, `--output json` one
document: the result as its file has it, else the tables and sentences of the answer.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import typer

from lmi_bench.core.durable import write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
_FILE_WIDTH = 180  # columns of a table that goes to a file or a pipe
_GAP, _EDGES = 3, 2  # spaces between columns, and at the table's edges


Form = Literal["table", "plain", "json"]


@dataclass(slots=True)
class _Answer:
    """How the answer of a command is printed, and what a JSON document of it will hold."""

    form: Form = "table"
    is_quiet: bool = False
    result: Any = None
    tables: list[dict[str, Any]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


_answer = _Answer()


@contextmanager
def shown_as(form: Form, *, is_quiet: bool) -> Iterator[None]:
    """Print the answer of the command inside in this form; an error leaves no document."""
    global _answer
    _answer = _Answer(form, is_quiet)
    try:
        try:
            yield
        except typer.Exit:  # an answer with an exit code, as a missed SLO has
            _print_document()
            raise
        _print_document()
    finally:
        _answer = _Answer()


def _print_document() -> None:
    if _answer.form == "json":
        said = {"text": _answer.text, "tables": _answer.tables}
        content = said if _answer.result is None else _answer.result
        _write(json.dumps(content, indent=2, default=str) + "\n")


def show_result(content: Any) -> None:
    """The result as plain JSON values, for `--output json`."""
    _answer.result = content


@functools.cache
def stdout() -> "Console":
    """The terminal, or a file as wide as a table may need."""
    return _console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


@functools.cache
def stderr() -> "Console":
    """Where notes, warnings and progress go."""
    return _console(stderr=True, soft_wrap=True)


def _console(**options: Any) -> "Console":
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            _discard(self.file)

    return Output(highlight=False, markup=False, emoji=False, **options)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)


def _discard(stream: IO[str]) -> None:
    """Print no more: the reader has closed the pipe (`| head`), but files are still written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    left: Sequence[str] = (),
    whole: Sequence[str] = (),
    give_way: Sequence[str] = (),
) -> None:
    """Print rows with the same keys: numbers aligned right, columns named in `left` aligned left.

    In a narrow terminal headings and the left columns are folded, never a number.

    whole     columns that are aligned left and not folded
    give_way  columns that may be left out, the least important first, until the rest fits
    """
    if not rows:
        return
    if _answer.form == "json":
        _answer.tables.append({"title": title, "rows": [dict(row) for row in rows]})
        return
    if _answer.form == "plain":
        lines = [f"# {title}", "\t".join(rows[0])]
        lines += ["\t".join(_cell(value) for value in row.values()) for row in rows]
        _write("\n".join(lines) + "\n")
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows, left_out = fit_columns(rows, give_way, stdout().width)
    crowded = _needed(rows, whole_headings=True) > stdout().width
    stdout().print(title, style="bold", soft_wrap=True)  # a table would fold it
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        if name in left:
            table.add_column(name, overflow="fold")
        elif name in whole:
            table.add_column(name, min_width=max(len(str(row[name])) for row in rows))
        else:
            shown = [*name.split(), *(str(row[name]) for row in rows)]
            widest = max(map(len, shown))
            width = widest if crowded else None  # rich itself would cut values to fold headings
            table.add_column(name, justify="right", min_width=widest, width=width)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    stdout().print(table)
    if left_out:
        note(f"no room for {', '.join(left_out)}: widen the terminal, or add --output plain")


def _cell(value: Any) -> str:
    """A value on one line, without a tab."""
    return "" if value is None else " ".join(str(value).split())


def fit_columns(
    rows: Sequence[Mapping[str, Any]], give_way: Sequence[str], width: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows without the first of `give_way` that must go to fit a width, and those names.

    >>> fit_columns([{"load": "8", "p99": "12.5", "state": "valid"}], ["p99"], 16)
    ([{'load': '8', 'state': 'valid'}], ['p99'])
    """
    kept, left_out = [dict(row) for row in rows], []
    for name in give_way if _answer.form == "table" else ():
        if not kept or _needed(kept) <= width:
            break
        if name in kept[0]:
            kept = [{key: row[key] for key in row if key != name} for row in kept]
            left_out.append(name)
    return kept, left_out


def _needed(rows: Sequence[Mapping[str, Any]], *, whole_headings: bool = False) -> int:
    """Width of a table, by default with its headings folded at their spaces."""
    total = _EDGES - _GAP
    for name in rows[0]:
        words = [name] if whole_headings else name.split()
        total += _GAP + max(len(str(text)) for text in (*words, *(row[name] for row in rows)))
    return total


def say(*texts: str) -> None:
    """Print lines of the answer on stdout; a terminal wraps them at words, but no command."""
    for text in texts:
        if _answer.form == "json":
            _answer.text += text.splitlines()
        elif _answer.form == "plain":
            _write(text + "\n")
        else:
            whole = not stdout().is_terminal or text.lstrip().startswith("lmi-bench ")
            stdout().print(text, soft_wrap=whole)


def note(*texts: str) -> None:
    """Print remarks on stderr."""
    for text in () if _answer.is_quiet else texts:
        stderr().print(text, style="dim")


def warn(*texts: str) -> None:
    """Print warnings on stderr."""
    for text in texts:
        stderr().print(f"warning: {text}", style="yellow")


def fail(text: str) -> None:
    """Print on stderr why the work failed."""
    stderr().print(f"error: {text}", style="red")


def write_json(path: Path | None, content: Any, what: str, *, indent: int = 2) -> None:
    """Write a result's file if one is wanted, and say where it is.

    what  noun for the content, such as `predictions`
    """
    show_result(content)
    if path is not None:
        write_text(path, json.dumps(content, indent=indent) + "\n")
        say(f"{what}: {path}")


class Terminal(AbstractContextManager["Terminal"]):
    """A job's listener: notes and warnings on stderr, and a progress line if it is a terminal.

    Use it as a context manager: the progress line is gone when the answer is printed.
    """

    note = staticmethod(note)
    warn = staticmethod(warn)

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def step(self, text: str) -> None:
        """Print a note unless a progress line is drawn."""
        if not stderr().is_terminal:
            note(text)

    def progress(self, description: str, done: float, total: float | None) -> None:
        """Move the progress line, which the first call draws."""
        if _answer.is_quiet:
            return
        if self._bar is None:
            self._bar = _progress_bar()
            self._bar.start()
        task = self._bar.task_ids[0]
        self._bar.update(task, description=description, completed=done, total=total or 1)

    def close(self) -> None:
        """Remove the progress line."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _progress_bar() -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=stderr(),
        transient=True,
        refresh_per_second=4,
        disable=not stderr().is_terminal,
    )
    bar.add_task("", total=1)
    return bar


def run_job(job: Callable[Concatenate[S, Terminal, P], R], settings: S, *more: P.args, **named: P.kwargs) -> R:
    """Run a job and print its notes, warnings and progress."""
    with Terminal() as listener:
        return job(settings, listener, *more, **named)
