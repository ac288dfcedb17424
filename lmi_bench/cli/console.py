"""What a person sees: tables on stdout, progress and warnings on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_FILE_WIDTH = 180  # columns of a table that goes to a file or a pipe

STDOUT = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
STDERR = Console(stderr=True, highlight=False, soft_wrap=True)


def print_table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    left: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> None:
    """Print rows with the same keys; numbers stand right, columns named in `left` stand left.

    When the terminal is narrow, headings and the left columns give way, never a number.

    whole  columns that stand left and give no way either
    """
    if not rows:
        return
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
            table.add_column(name, justify="right", min_width=widest)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    STDOUT.print(table)


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
