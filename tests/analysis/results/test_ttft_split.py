"""Where the time to first token goes: by what the server states in its answers or on its page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import GeneratorReport, Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.server_metrics import ServerMetrics
from lmi_bench.core.workload import LevelSpec
from lmi_bench.report.text import ttft_parts_line

SERVED = ServerMetrics(
    ttft_mean_ms=100.0, queue_mean_ms=30.0, prefill_mean_ms=65.0, first_tokens=10.0
)


def _level(server=None, *, load=None, late_s=0.002, count=10, **stages) -> Level:
    """Requests sent a little late, whose first token comes 0.12 s after the send."""
    records = tuple(
        RequestRecord(
            i,
            float(i),
            Exchange(i + late_s, (i + late_s + 0.12, i + 1.0), ended_s=i + 1.0, **stages),
        )
        for i in range(count)
    )
    spec = LevelSpec(0, load or Load(rate_per_s=1.0), num_requests=count)
    check = GeneratorReport(ttft_error_bound_ms=0.5)
    return summarise_level(LevelRun(spec, 0, records, server=server, check=check))


def test_the_parts_add_up_to_the_mean_ttft_from_the_due_time():
    level = _level(SERVED)
    split = level.ttft_split
    assert split is not None
    parts = (split.client_ms, split.network_ms, split.queue_ms, split.prefill_ms, split.other_ms)
    assert parts == pytest.approx((2.0, 20.0, 30.0, 65.0, 5.0))
    assert sum(parts) == pytest.approx(level.of("ttft").mean)
    assert (split.bound_ms, split.requests, split.source) == (0.5, 10, "metrics")
    assert Level.from_json(level.to_json()).ttft_split == split


def test_in_a_closed_loop_the_client_has_no_part():
    assert _level(SERVED, load=Load(concurrency=1)).ttft_split.client_ms == 0.0


def test_times_in_the_answers_come_before_the_page_and_leave_the_rest_to_the_network():
    split = _level(SERVED, queue_s=0.01, prefill_s=0.04).ttft_split
    assert (split.queue_ms, split.prefill_ms) == pytest.approx((10.0, 40.0))
    assert split.network_ms == pytest.approx(70.0)
    assert (split.other_ms, split.source) == (None, "answers")


def test_a_server_without_prefill_times_has_the_rest_of_its_ttft_there():
    split = _level(replace(SERVED, prefill_mean_ms=None)).ttft_split
    assert (split.prefill_ms, split.other_ms) == (70.0, None)
    assert split.network_ms == pytest.approx(20.0)


@pytest.mark.parametrize(
    "server",
    [
        None,
        replace(SERVED, first_tokens=13.0),  # others use the server
        replace(SERVED, queue_mean_ms=None),
        replace(SERVED, ttft_mean_ms=None),
    ],
)
def test_without_times_of_our_requests_nothing_is_split(server):
    assert _level(server).ttft_split is None


def test_the_console_names_the_largest_part_first():
    assert ttft_parts_line([_level(), _level(SERVED)]) == (
        "where TTFT goes at 1 req/s (mean 122 ms): 53% prefill, 25% server queue, "
        "16% network and HTTP, 4% not explained, 2% client"
    )
    assert ttft_parts_line([_level()]) is None
