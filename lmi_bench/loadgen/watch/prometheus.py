"""The samples of a Prometheus text page: names, labels, values.

Source: the exposition format 0.0.4. Only the metrics that are asked for are read, since a server's
page has thousands of lines and is read once a second beside a measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

_LABELS = r'(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?'
_VALUE = r"[ \t]*([^\s{]\S*)(?:[ \t]+-?\d+)?[ \t]*$"


class Sample(NamedTuple):
    """One line: `labels` as written, braces included, or "" without labels."""

    name: str
    labels: str
    value: float


class SampleReader:
    """Reads the samples of the given names."""

    def __init__(self, names: Collection[str]) -> None:
        either = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        self._pattern = re.compile(rf"^({either})(?![\w:]){_LABELS}{_VALUE}", re.MULTILINE)

    def read(self, text: str) -> Iterator[Sample]:
        """The samples of a page, in its order; a value that is no number is left out."""
        for name, labels, value in self._pattern.findall(text):
            try:
                number = float(value)
            except ValueError:
                continue
            yield Sample(name, labels, number)


def total(samples: Sequence[Sample], names: Sequence[str]) -> float | None:
    """The sum over all label sets of the first of the names that is there; None: none is.

    >>> total([Sample("a", '{engine="0"}', 1.0), Sample("a", '{engine="1"}', 2.0)], ["b", "a"])
    3.0
    """
    for name in names:
        values = [sample.value for sample in samples if sample.name == name]
        if values:
            whole = math.fsum(values)
            return whole if math.isfinite(whole) else None
    return None
