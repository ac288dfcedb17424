"""The page of the posts: complete, of this script, and stale where a figure or verdict moves."""

import re

import pytest

from benchmarks.posts import CLAIMS, PAGE, stale
from benchmarks.support.posts_program import AGREES, DIFFERS, NEEDS_GPU, Claim, Shown, inside, near

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {line.split(" | ")[0][2:]: line for line in TEXT.splitlines() if re.match(r"\| [TMJF]\d\d ", line)}


def test_each_of_the_87_claims_has_one_row_with_one_verdict():
    assert len(CLAIMS) == 87
    assert set(ROWS) == set(CLAIMS)
    for line in ROWS.values():
        verdict = line.split(" | ")[-1]
        assert verdict.startswith((AGREES, DIFFERS, NEEDS_GPU)), line


def test_every_published_figure_has_a_row():
    """132 cells with two figures each, and 32 and 32 with one; six ways of batching."""
    tables = re.findall(r"^\| [\w ]+, (?:\d x )?ml\..* users \|", TEXT, re.MULTILINE)
    assert len(tables) == 2 * 132 + 32 + 32
    assert len(re.findall(r"^\| \d+ / \d+ \| (?:Dynamic|Continuous)", TEXT, re.MULTILINE)) == 6


@pytest.mark.parametrize(
    ("old", "new"), [("116.7 FLOP/byte", "126.7 FLOP/byte"), ("| agrees (1 %) |", "| differs because of it |")]
)
def test_a_figure_or_a_verdict_that_moves_makes_the_page_stale(old, new):
    assert stale(TEXT, TEXT) == []
    assert len(stale(TEXT, TEXT.replace(old, new, 1))) == 1


def test_measured_figures_may_move_and_their_verdicts_may_not():
    line = next(row for row in ROWS.values() if "| measured: " in row and "| agrees" in row)
    assert stale(TEXT, TEXT.replace(line, re.sub(r"\d+\.\d", "9.9", line))) == []
    assert stale(TEXT, TEXT.replace(line, line.replace("| agrees", "| differs because")))


def test_a_claim_that_differs_needs_a_reason():
    class Silent:
        def run(self, command):
            return command

    claim = Claim("X", "a", "1", ("doctor",), "run", lambda _: Shown("2", agrees=False))
    with pytest.raises(ValueError, match="no reason"):
        claim.verdict(Silent())


def test_tolerances_are_of_the_claimed_figure_and_intervals_hold_their_ends():
    assert near(104, 100, 0.05).agrees
    assert not near(106, 100, 0.05).agrees
    assert inside({"predicted": 5, "low": 4, "high": 6}, 6, "s").agrees
    assert not inside({"predicted": 5, "low": 4, "high": 6}, 6.1, "s").agrees
