"""A sweep's time: which levels are begun, on a clock that the tests turn by hand."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.search.next_level import auto_levels
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSizes, LevelSpec
from lmi_bench.jobs.sweep.limits import TimeBox, likely_level_s, read_max_time
from tests.analysis.search.servers import MadeUpServer
from tests.levels import level_of


def sweep(server, max_s):
    """Loads of the levels that ran, what was said, and the seconds that all took."""
    now_s, notes, lines = 0.0, [], []
    box = TimeBox(max_s, note=notes.append, clock=lambda: now_s)
    rule = auto_levels(LevelSizes(requests_per_user=3), fits=box.fits)
    while (spec := rule(lines)) is not None:
        lines.append(summarise_level(server.level(spec)))
        now_s += lines[-1].wall_s
        assert len(lines) < 40
    return [line.load.concurrency for line in lines], notes, now_s


def test_the_doubling_ends_before_the_level_that_would_not_be_over_in_time():
    """One second an answer whatever the load: four a level, and nothing is ever full."""
    loads, notes, took_s = sweep(MadeUpServer(lambda c: 1.0), 17.0)
    assert loads[:4] == [1, 2, 4, 8]
    assert 16 not in loads
    assert took_s <= 17.0
    assert len(notes) == 1
    assert "left out concurrency 16" in notes[0]
    assert "of 0:17 are left" in notes[0]


def test_finer_levels_run_in_the_time_that_the_next_doubling_would_overrun():
    """Full at 8: c/8 seconds an answer from there. 32 takes 16 s and 6 and 12 take 4 and 6."""
    server = MadeUpServer(lambda c: max(1.0, c / 8))
    loads, _, took_s = sweep(server, 4 * 4 + 8 + 11.0)
    assert max(loads) < 32
    assert {6, 12} & set(loads)
    assert took_s <= 35.0


def test_without_a_limit_the_rule_alone_ends_the_sweep():
    server = MadeUpServer(lambda c: max(1.0, c / 8))
    assert sweep(server, None)[0] == sweep(server, 1e9)[0]
    assert sweep(server, None)[1] == []


def test_the_first_level_is_begun_however_little_time_there_is():
    assert sweep(MadeUpServer(lambda c: 5.0), 1.0)[0] == [1]


def test_a_level_is_expected_to_gain_what_the_last_doubling_gained():
    """1 user: 1 request/s, 2 users: 1.5. Four should bring 2.25 a second: 12 take 5.33 s."""
    lines = [level_of(concurrency=1, requests=3, wall_s=3.0), level_of(concurrency=2, requests=6, wall_s=4.0)]
    spec = LevelSpec(2, Load(concurrency=4), num_requests=12)
    assert likely_level_s(spec, lines) == pytest.approx(12 / 2.25)
    assert likely_level_s(LevelSpec(2, Load(concurrency=4), duration_s=2.0), lines) == 2.0
    assert likely_level_s(LevelSpec(2, Load(rate_per_s=4.0), num_requests=12), lines) == 3.0


def test_after_one_level_answers_are_expected_to_take_as_long_as_there():
    """Three answers took 39 s: two users' six take as long, 39 s, not 78."""
    lines = [level_of(concurrency=1, requests=3, wall_s=39.0)]
    assert likely_level_s(LevelSpec(1, Load(concurrency=2), num_requests=6), lines) == 39.0


def test_a_level_of_a_slow_server_is_as_short_as_the_time_demands():
    """13 s an answer: 32 of one user would take 416 s. Of five minutes a level has 25 s, or time
    for one and a half times three rounds."""
    box = TimeBox(300.0)
    first = box.shortened(LevelSpec(0, Load(concurrency=1), num_requests=32), [])
    assert first.duration_s == 25.0
    lines = [level_of(concurrency=1, requests=2, wall_s=26.0)]
    second = box.shortened(LevelSpec(1, Load(concurrency=2), num_requests=32), lines)
    assert second.duration_s == pytest.approx(1.5 * 3 * 13)
    assert box.fits(LevelSpec(1, Load(concurrency=2), num_requests=32), lines)
    assert TimeBox(None).shortened(first, lines) == first


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("1h", 3600.0)])
def test_a_time_is_seconds_minutes_or_hours(text, seconds):
    assert read_max_time(text) == seconds


def test_none_is_no_limit_and_anything_else_is_refused():
    assert read_max_time("none") is None
    for text in ("", "soon", "-1", "0m", "inf"):
        with pytest.raises(InputError, match="--max-time"):
            read_max_time(text)
