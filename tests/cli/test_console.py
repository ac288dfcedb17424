"""Tables in a narrow terminal: what must be seen stays."""

from __future__ import annotations

import pytest

from lmi_bench.cli.console import fit_columns

ROW = {"load": "16", "p90": "12.5", "p99": "31.25", "errors": "0/48", "state": "invalid"}


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (80, ["load", "p90", "p99", "errors", "state"]),
        # 4 + 4 + 5 + 6 + 7 letters, four gaps of 3 and 2 at the edges are 40
        (40, ["load", "p90", "p99", "errors", "state"]),
        (39, ["load", "p90", "errors", "state"]),
        (31, ["load", "errors", "state"]),
        (5, ["load", "errors", "state"]),
    ],
)
def test_the_least_telling_columns_go_first_and_the_state_never(width, kept):
    rows, left_out = fit_columns([ROW, {**ROW, "load": "32"}], ["p99", "p90"], width)
    assert [list(row) for row in rows] == [kept, kept]
    assert set(left_out) == set(ROW) - set(kept)
