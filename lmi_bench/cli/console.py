"""What a person sees: tables on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmi_bench.core.durable import write_text

_FILE_WIDTH = 180  # columns of a table that goes to a file or a pipe
_GAP, _EDGES = 3, 2  # spaces between two columns, and beside the table

STDOUT = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
STDERR = Console(stderr=True, highlight=False, soft_wrap=True)


def print_table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    left: Sequence[str] = (),
    whole: Sequence[str] = (),
    give_way: Sequence[str] = (),
) -> None:
    """Print rows with the same keys; numbers stand right, columns named in `left` stand left.

    When the terminal is narrow, headings and the left columns give way, never a number.

    whole     columns that stand left and give no way either
    give_way  columns that may be left out, the least telling first, until the rest fits
    """
    if not rows:
        return
    rows, left_out = fit_columns(rows, give_way, STDOUT.width)
    crowded = _needed(rows, whole_headings=True) > STDOUT.width
    STDOUT.print(title, markup=False, style="bold", soft_wrap=True)  # a table would fold it
    table = Table(
        header_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
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
    STDOUT.print(table)
    if left_out:
        note(f"no room for {', '.join(left_out)}: widen the terminal, or see the report")


def fit_columns(
    rows: Sequence[Mapping[str, Any]], give_way: Sequence[str], width: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows without the first of `give_way` that must go to fit a width, and those names.

    >>> fit_columns([{"load": "8", "p99": "12.5", "state": "valid"}], ["p99"], 16)
    ([{'load': '8', 'state': 'valid'}], ['p99'])
    """
    kept, left_out = [dict(row) for row in rows], []
    for name in give_way:
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


def say(text: str) -> None:
    """A line of the answer, on stdout."""
    STDOUT.print(text, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """A remark on what is going on, on stderr."""
    STDERR.print(text, markup=False, style="dim")


def warn(text: str) -> None:
    """A warning, on stderr."""
    STDERR.print(f"warning: {text}", markup=False, style="yellow")


def fail(text: str) -> None:
    """Why the work came to nothing, on stderr."""
    STDERR.print(f"error: {text}", markup=False, style="red")


def write_json(path: Path | None, content: Any, *, indent: int = 2) -> None:
    """Write a result's file, where one was asked for; the folder is made, the old file replaced."""
    if path is not None:
        write_text(path, json.dumps(content, indent=indent) + "\n")


class Reporter(Protocol):
    """Takes the progress of one piece of work."""

    def __call__(self, description: str, done: float, total: float | None) -> None: ...


@contextmanager
def progress() -> Iterator[Reporter]:
    """A progress line on stderr; nothing is drawn where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=STDERR,
        transient=True,
        refresh_per_second=4,
        disable=not STDERR.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=1)

        def report(description: str, done: float, total: float | None) -> None:
            bar.update(task, description=description, completed=done, total=total or 1)

        yield report


class Terminal:
    """A job's listener: notes and warnings on stderr, and a progress line where it is a terminal.

    A progress line that was begun ends with `close`.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._report: Reporter | None = None

    def note(self, text: str) -> None:
        """A dim line on stderr."""
        note(text)

    def step(self, text: str) -> None:
        """A dim line on stderr where no progress line is drawn."""
        if not STDERR.is_terminal:
            note(text)

    def warn(self, text: str) -> None:
        """A yellow line on stderr."""
        warn(text)

    def progress(self, description: str, done: float, total: float | None) -> None:
        """Move the progress line, which the first call draws."""
        if self._report is None:
            self._report = self._stack.enter_context(progress())
        self._report(description, done, total)

    def close(self) -> None:
        """Remove the progress line."""
        self._stack.close()
        self._report = None


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A listener for the time of one job; its progress line is gone when the answer is printed."""
    listener = Terminal()
    try:
        yield listener
    finally:
        listener.close()
