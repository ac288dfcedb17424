"""What a person sees: tables on stdout, progress and warnings on stderr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

STDOUT = Console(highlight=False, soft_wrap=False)
STDERR = Console(stderr=True, highlight=False)


def print_table(title: str, rows: Sequence[Mapping[str, Any]], *, left: Sequence[str] = ()) -> None:
    """Print rows with the same keys; numbers stand right, columns named in `left` stand left."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    STDOUT.print(table)


def say(text: str) -> None:
    """A line of the answer, on stdout."""
    STDOUT.print(text, markup=False)


def note(text: str) -> None:
    """A remark on what is going on, on stderr."""
    STDERR.print(text, markup=False, style="dim")


def warn(text: str) -> None:
    """A warning, on stderr."""
    STDERR.print(f"warning: {text}", markup=False, style="yellow")


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
