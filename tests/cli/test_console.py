"""Tables in a narrow terminal: what must be seen stays."""

from __future__ import annotations

import subprocess
import sys

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


def test_what_a_server_or_a_user_wrote_is_printed_as_it_is(capfd):
    """Brackets are no markup and names no emoji, in a table either."""
    program = (
        "from lmi_bench.cli.console import note, print_table, say\n"
        "print_table('t [/x]', [{'target': 'gpu [fp8]', 'said': 'unexpected [/INST]'}])\n"
        "say('runs/a:100:b [bold]')\nnote('[/dim]')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[/dim]\n")
    for text in ("t [/x]", "gpu [fp8]", "unexpected [/INST]", "runs/a:100:b [bold]"):
        assert text in done.stdout
