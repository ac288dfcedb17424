"""A table as plain text cells, and its fields, shared by page, Markdown and console."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from typing import Any, Final, Generic, TypeVar

from lmi_bench.catalog.tables import read_rows

T = TypeVar("T")
NOTES: Final = {row["table"]: row["note"] for row in read_rows("notes.csv", "report")}
"""What is said under a table, where it is longer than a line."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    hint      what to show on hover, such as why a percentile is missing
    tone      "", "na", "good", "warn" or "bad"
    interval  of the number, shown under it
    """

    text: str
    hint: str = ""
    tone: str = ""
    interval: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; neighbouring columns with the same `group` share a heading."""

    title: str
    group: str = ""
    numeric: bool = True
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row; its first cell is its heading. tone as a cell's, `strong` marks the row to read."""

    cells: tuple[Cell, ...]
    tone: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table, ready to be placed."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def groups(self) -> tuple[tuple[str, int, Column], ...]:
        """Headings over neighbouring columns: group, number of columns under it, the first one."""
        beside = groupby(self.columns, key=lambda column: column.group or id(column))
        return tuple((first.group, 1 + len(others), first) for _, (first, *others) in beside)


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """A column with the function that makes its cell, or a cell's text, from an item.

    console  heading on the console; "" leaves the column out there
    on_page  False leaves it out of the page
    """

    title: str
    cell: Callable[[T], Cell | str]
    group: str = ""
    _: KW_ONLY
    numeric: bool = True
    hint: str = ""
    console: str = ""
    on_page: bool = True

    def of(self, item: T) -> Cell:
        """The item's cell."""
        found = self.cell(item)
        return Cell(found) if isinstance(found, str) else found


def table_of(
    caption: str,
    fields: Sequence[Field[Any]],
    items: Iterable[Any],
    note: str = "",
    *,
    tone: Callable[[Any], str] = lambda _: "",
    strong: Callable[[Any], bool] = lambda _: False,
) -> Table:
    """The page's table, one row per item."""
    shown = [each for each in fields if each.on_page]
    rows = tuple(Row(tuple(each.of(item) for each in shown), tone(item), strong(item)) for item in items)
    columns = (Column(each.title, each.group, each.numeric, each.hint) for each in shown)
    return Table(caption, tuple(columns), rows, note)


def console_rows(
    fields: Sequence[Field[Any]], items: Iterable[Any], text: Callable[[Cell], str] = lambda cell: cell.text
) -> list[dict[str, str]]:
    """The items as console rows, all with the same keys; text: of a cell, such as `bracketed`."""
    return [{one.console: text(one.of(item)) for one in fields if one.console} for item in items]


def bracketed(cell: Cell) -> str:
    """A cell's text with its interval: `47 [41-55]`."""
    between = cell.interval.replace(" to ", "-")
    return f"{cell.text} [{between}]" if between else cell.text
