"""Why no level meets the SLOs: a miss is told from what nobody can know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.sweep.result import AS_STATED, SloOptions, slo_outcome
from lmi_bench.report.slo_text import slo_headline
from tests.levels import level_of

SLOS = (parse_slo("ttft_p90<=1s"),)


def run_of(*levels):
    """A run of (users, requests, TTFT in seconds)."""
    records = [
        tuple(
            RequestRecord(i, 0.0, Exchange(0.0, (ttft_s, 3.0), (1, 1)), input_tokens=1, output_tokens=2)
            for i in range(n)
        )
        for _, n, ttft_s in levels
    ]
    lines = [level_of(level=i, concurrency=users) for i, (users, _, _) in enumerate(levels)]
    return Run(Path("run"), Manifest(), lines, records, None)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        (((16, 48, 2.0), (32, 96, 3.0)), "none: ttft_p90<=1000ms; concurrency 16 misses ttft_p90<=1000ms"),
        (
            ((1, 3, 0.1), (2, 6, 0.1), (16, 48, 2.0)),
            "not measured: ttft_p90<=1000ms; concurrency 16 misses ttft_p90<=1000ms; no valid "
            "lower level has the 29 answered requests that it takes (--requests-per-level 29)",
        ),
        (
            ((1, 3, 0.1),),
            "not measured: ttft_p90<=1000ms; no valid level has the 29 answered requests that it "
            "takes (--requests-per-level 29)",
        ),
    ],
)
def test_a_miss_is_told_from_too_few_requests(levels, said):
    run = run_of(*levels)
    found = slo_headline(run.levels, run.records, SLOS)
    assert f"{found.value}: {found.detail}" == said


def test_an_invalid_level_neither_meets_nor_misses_the_slos():
    """Its requests left late: a server that was given less load may seem fast."""
    for levels in (((1, 32, 0.1), (16, 48, 0.5)), ((1, 32, 2.0), (16, 48, 3.0))):
        run = run_of(*levels)
        lines = [replace(line, valid=False, invalid_reason="client: late") for line in run.levels]
        late = replace(run, levels=lines)
        assert slo_outcome(late, SLOS, AS_STATED) == "not measured"
        options = SloOptions(limits=(parse_slo("ttft_mean<=1s"),))
        assert slo_outcome(late, [], options) == "not measured"
        met = slo_outcome(run_of(*levels), SLOS, AS_STATED) == "passed"
        cut = [replace(lines[0], stopped_by="errors"), *lines[1:]]
        cut_short = slo_outcome(replace(late, levels=cut), SLOS, AS_STATED)
        assert cut_short == ("not measured" if met else "missed")
        first = replace(run, levels=[lines[0], run.levels[1]])
        assert slo_outcome(first, SLOS, AS_STATED) == ("passed" if met else "not measured")


@pytest.mark.parametrize(
    ("levels", "outcome"),
    [
        (((1, 3, 0.1), (16, 48, 0.5)), "passed"),
        (((1, 32, 2.0), (16, 48, 3.0)), "missed"),
        (((1, 32, 2.0), (16, 3, 0.5)), "missed"),  # more users are not faster
        (((1, 3, 0.1), (16, 48, 2.0)), "not measured"),
        (((1, 3, 0.1),), "not measured"),
        (((1, 3, 2.0),), "missed"),  # even the fastest is over
    ],
)
def test_slos_are_missed_only_where_the_lowest_load_is_known_to_miss_them(levels, outcome):
    assert slo_outcome(run_of(*levels), SLOS, AS_STATED) == outcome
