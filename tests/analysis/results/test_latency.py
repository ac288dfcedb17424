"""Latency definitions: a request whose times are round numbers, and what follows by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.latency import samples_needed, summarise_level, summarise_ms
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import LATENCY_KEY, STATISTICS, GeneratorReport, Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.server_metrics import ServerMetrics
from lmi_bench.core.workload import LevelSpec
from lmi_bench.report.text import ttft_parts_line
from lmi_bench.report.values import DEFINITIONS


def record(request_id=0, *, due=0.0, sent=0.0, times=(), counts=(), inputs=10, ended_s=None, **more):
    exchange = Exchange(sent, tuple(times), tuple(counts), ended_s=ended_s)
    return RequestRecord(request_id, due, exchange, input_tokens=inputs, **more)


def latencies(request, *, open_loop):
    """Its latencies in seconds by metric, without those that it does not have."""
    columns = columns_of([request])
    each = {metric: float(own[0]) for metric, own in columns.each_s(open_loop=open_loop).items()}
    found = {metric: value for metric, value in each.items() if not math.isnan(value)}
    return {**found, "itl": columns.values_s("itl", open_loop=open_loop)[0].tolist()}


# Due at 1 s, sent 0.5 s late, first token at 2 s, then one every 0.25 s: five tokens.
LATE = record(due=1.0, sent=1.5, times=(2.0, 2.25, 2.5, 2.75, 3.0))


def test_an_open_loop_counts_from_the_due_time():
    """2.0 - 1.0, (3.0 - 1.0), (3.0 - 1.0) / 5; the delay of 0.5 s is in all of them."""
    latency = latencies(LATE, open_loop=True)
    assert latency["ttft"] == pytest.approx(1.0)
    assert latency["ttft_from_sent"] == pytest.approx(0.5)
    assert latency["dispatch_delay"] == pytest.approx(0.5)
    assert latency["e2e"] == pytest.approx(2.0)
    assert latency["latency_per_token"] == pytest.approx(0.4)


def test_a_closed_loop_counts_from_the_send():
    latency = latencies(LATE, open_loop=False)
    assert latency["ttft"] == latency["ttft_from_sent"] == pytest.approx(0.5)
    assert latency["e2e"] == pytest.approx(1.5)
    assert latency["latency_per_token"] == pytest.approx(0.3)


def test_overload_shows_from_the_due_time_and_hides_from_the_send():
    """8 requests at 10/s, one at a time, 500 ms each: means of 500 ms and 500 + 400 * 3.5 = 1900.

    Request i is sent at 0.5 i and due at 0.1 i, so it waits 0.4 i; the mean of i is 3.5.
    """
    records = tuple(record(i, due=0.1 * i, sent=0.5 * i, times=(0.5 * i + 0.5,)) for i in range(8))
    line = summarise_level(LevelRun(LevelSpec(0, Load(rate_per_s=10.0), num_requests=8), 0, records))
    assert line.of("ttft_from_sent").mean == pytest.approx(500)
    delay_ms = line.of("dispatch_delay").mean
    assert line.of("e2e").mean - line.of("e2e_from_sent").mean == pytest.approx(delay_ms)
    assert line.of("ttft").mean == pytest.approx(1900)
    assert line.of("dispatch_delay").max == pytest.approx(2800)


def test_tpot_divides_by_the_tokens_and_itl_takes_the_events():
    """Three events of 1, 3 and 3 tokens, 0.3 s apart: TPOT 0.6 / 6, two gaps of 0.3."""
    bundled = record(times=(1.0, 1.3, 1.6), counts=(1, 3, 3))
    latency = latencies(bundled, open_loop=False)
    assert latency["tpot"] == pytest.approx(0.1)
    assert latency["itl"] == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize(
    "lonely", [record(times=(1.0,)), record(times=(1.0,), counts=(7,))], ids=["one token", "all tokens in one event"]
)
def test_a_single_event_has_neither_tpot_nor_itl(lonely):
    latency = latencies(lonely, open_loop=False)
    assert "tpot" not in latency
    assert not latency["itl"]
    assert latency["ttft"] == pytest.approx(1.0)


def test_an_event_without_a_token_is_not_the_first_token():
    empty_first = record(times=(0.5, 1.0, 1.2), counts=(0, 1, 1))
    latency = latencies(empty_first, open_loop=False)
    assert latency["ttft"] == pytest.approx(1.0)
    assert latency["itl"] == pytest.approx([0.2])


@pytest.mark.parametrize(("quantile", "needed"), [(0.9, 29), (0.95, 59), (0.99, 299)])
def test_samples_needed_are_those_of_the_one_sided_95_percent_bound(quantile, needed):
    """n samples all lie below the quantile with probability q**n; at 5 % it is n = ln .05/ln q."""
    assert samples_needed(quantile) == needed
    assert quantile**needed <= 0.05 < quantile ** (needed - 1)


def test_an_unsupported_quantile_is_null_with_the_reason():
    summary = summarise_ms([0.1] * 28)
    assert summary.p90 is None
    assert summary.unsupported["p90"] == "needs 29 samples, has 28"
    assert summary.p50 == pytest.approx(100)
    assert summarise_ms([0.1] * 29).p90 == pytest.approx(100)


def test_no_samples_give_nulls_not_zeros():
    summary = summarise_ms([])
    assert summary.n == 0
    assert all(summary.value(name) is None for name in STATISTICS)


@given(st.lists(st.floats(0, 1e4), min_size=29, max_size=80))
def test_quantiles_interpolate_linearly_between_order_statistics(values):
    """The rank q * (n - 1), written out by hand."""
    ordered = sorted(values)
    rank = 0.9 * (len(values) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(values) - 1)
    expected = ordered[below] + (rank - below) * (ordered[above] - ordered[below])
    assert summarise_ms(values).p90 == pytest.approx(expected * 1e3, rel=1e-9, abs=1e-6)


def closed_level(records, concurrency=1, **more):
    return LevelRun(LevelSpec(3, Load(concurrency=concurrency), num_requests=len(records)), 0, tuple(records), **more)


def test_throughput_is_output_tokens_over_first_send_to_last_event():
    """Two requests back to back, 4 tokens each, sent at 1 and 3, last token at 5: 8 tok in 4 s."""
    records = [
        record(0, due=1.0, sent=1.0, times=(1.5, 2.0, 2.5, 3.0), inputs=6),
        record(1, due=3.0, sent=3.0, times=(3.5, 4.0, 4.5, 5.0), inputs=6),
    ]
    line = summarise_level(closed_level(records))
    assert line.wall_s == pytest.approx(4)
    assert line.throughput_tokens_per_s == pytest.approx(2)
    assert line.total_throughput_tokens_per_s == pytest.approx(5)
    assert line.request_throughput_per_s == pytest.approx(0.5)
    assert line.mean_concurrency == pytest.approx(1)
    assert line.little_law_ratio == pytest.approx(1)


def test_a_failed_request_is_counted_by_kind_and_is_in_no_latency():
    """Its 2 tokens are not output, but the time that it took belongs to the wall."""
    records = [
        record(0, times=(1.0, 2.0)),
        record(1, times=(1.0, 2.0), status="timeout", ended_s=10.0),
        record(2, status="connect"),
        record(3, status="timeout", ended_s=4.0),
    ]
    line = summarise_level(closed_level(records, concurrency=4))
    assert line.errors == 3
    assert line.errors_by_kind == {"connect": 1, "timeout": 2}
    assert line.output_tokens == 2
    assert line.of("e2e").n == 1
    assert line.wall_s == pytest.approx(10)


def test_a_level_of_failures_has_no_throughput_and_no_latency():
    line = summarise_level(closed_level([record(0, status="connect")]))
    assert line.throughput_tokens_per_s is None
    assert line.little_law_ratio is None
    assert line.of("e2e").mean is None


def test_the_trailer_of_an_answer_is_not_part_of_the_wall():
    assert columns_of([record(times=(1.0, 2.0), ended_s=2.7)]).wall_s == pytest.approx(2)


def test_an_invalid_level_says_so():
    check = GeneratorReport(valid=False, reason="client: the loop lagged by 80 ms")
    line = summarise_level(closed_level([record(times=(1.0,))], check=check, stopped_by="timeout"))
    assert line.valid is False
    assert line.invalid_reason == "client: the loop lagged by 80 ms"
    assert line.stopped_by == "timeout"
    assert line.generator.valid is False


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.lists(st.floats(1e-3, 1), min_size=1, max_size=12)), min_size=1, max_size=20
    )
)
def test_mean_concurrency_is_the_time_average_of_requests_in_flight(plan):
    """Little's law against a second method: sweep the in-flight count over its change points."""
    records = [record(i, due=sent, sent=sent, times=sent + np.cumsum(gaps)) for i, (sent, gaps) in enumerate(plan)]
    line = summarise_level(closed_level(records, concurrency=len(records)))
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.token_times_s[-1], -1) for r in records])
    area, in_flight = 0.0, 0
    for (here, step), (there, _) in itertools.pairwise(changes):
        in_flight += step
        area += in_flight * (there - here)
    wall = changes[-1][0] - changes[0][0]
    assert line.mean_concurrency == pytest.approx(area / wall, rel=1e-6)


def test_every_latency_of_a_level_has_a_formula():
    line = summarise_level(closed_level([record(times=(1.0, 2.0))])).to_json()
    for key in LATENCY_KEY.values():
        if key in ("ttft_answer_ms", "connect_ms", "tls_ms"):
            continue  # only where requests reasoned; of connections, not of requests
        assert set(line[key]) == {*STATISTICS, "n", "unsupported"}
        assert key in {each.key for each in DEFINITIONS if each.formula}


def test_the_answers_first_token_is_reported_beside_the_thoughts():
    """By hand: sent at 1 s, thought at 1.5 s, answer at 3 s; the other request does not reason."""
    thinking = RequestRecord(
        0, 1.0, Exchange(1.0, (1.5, 2.0, 3.0, 3.5), first_answer_s=3.0, reasoning_tokens=2), output_tokens=4
    )
    plain = RequestRecord(1, 1.0, Exchange(1.0, (1.25, 2.0)), output_tokens=2)
    spec = LevelSpec(index=0, load=Load(concurrency=2), num_requests=2)
    line = summarise_level(LevelRun(spec, 1, (thinking, plain)))
    assert line.of("ttft").max == pytest.approx(500.0)
    assert line.of("ttft_answer").n == 1
    assert line.of("ttft_answer").mean == pytest.approx(2000.0)
    assert line.reasoning_token_share == pytest.approx(2 / 6)
    assert "ttft_answer_ms" not in summarise_level(LevelRun(spec, 1, (plain,))).to_json()


def test_an_answer_that_came_whole_has_no_first_token_time():
    whole = RequestRecord(0, 1.0, Exchange(1.0, (3.0,), (4,), streamed=False))
    spec = LevelSpec(index=0, load=Load(concurrency=1), num_requests=1)
    line = summarise_level(LevelRun(spec, 1, (whole,)))
    assert line.of("ttft").n == line.of("ttft_from_sent").n == 0
    assert line.of("e2e").mean == pytest.approx(2000.0)
    assert line.of("latency_per_token").mean == pytest.approx(500.0)


def test_ttft_of_conversations_is_told_by_turns_in_bands_that_double():
    """Two conversations of nine turns, whose TTFT grows by 10 ms a turn."""
    records = tuple(
        RequestRecord(i, float(i), Exchange(float(i), (i + 0.01 * (i % 9 + 1), i + 0.5)), session=i // 9, turn=i % 9)
        for i in range(18)
    )
    spec = LevelSpec(0, Load(rate_per_s=1.0, sessions=True), num_requests=18)
    level = summarise_level(LevelRun(spec, 0, records))
    bands = [(each.first_turn, each.last_turn, each.ttft_ms.n) for each in level.sessions.ttft_by_turns]
    assert bands == [(1, 1, 2), (2, 2, 2), (3, 4, 4), (5, 8, 8), (9, 16, 2)]
    means = [each.ttft_ms.mean for each in level.sessions.ttft_by_turns]
    assert means == pytest.approx([10.0, 20.0, 35.0, 65.0, 90.0])
    assert Level.from_json(level.to_json()).sessions == level.sessions


SERVED = ServerMetrics(ttft_mean_ms=100.0, queue_mean_ms=30.0, prefill_mean_ms=65.0, first_tokens=10.0)


def _level(server=None, *, load=None, late_s=0.002, count=10, **stages) -> Level:
    """Requests sent a little late, whose first token comes 0.12 s after the send."""
    records = tuple(
        RequestRecord(i, float(i), Exchange(i + late_s, (i + late_s + 0.12, i + 1.0), ended_s=i + 1.0, **stages))
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
    split = _level(queue_s=0.01, prefill_s=0.04).ttft_split
    assert (split.queue_ms, split.prefill_ms) == pytest.approx((10.0, 40.0))
    assert split.network_ms == pytest.approx(70.0)
    assert (split.other_ms, split.source) == (None, "answers")


def test_beside_times_in_the_answers_the_page_tells_what_it_does_not_explain():
    """Of its 100 ms 30 are its queue and 65 its prefill; 5 are neither, here as in the answers."""
    split = _level(SERVED, queue_s=0.01, prefill_s=0.04).ttft_split
    parts = (split.network_ms, split.queue_ms, split.prefill_ms, split.other_ms)
    assert parts == pytest.approx((65.0, 10.0, 40.0, 5.0))
    assert split.source == "answers"
    for page in (replace(SERVED, first_tokens=13.0), replace(SERVED, prefill_mean_ms=None)):
        split = _level(page, queue_s=0.01, prefill_s=0.04).ttft_split
        assert (split.network_ms, split.other_ms) == (pytest.approx(70.0), None)


def test_a_page_that_states_its_queue_alone_leaves_all_the_rest_unexplained():
    """As TGI's does: 120 ms from the send, of which 30 in the queue."""
    level = _level(ServerMetrics(queue_mean_ms=30.0, first_tokens=10.0))
    split = level.ttft_split
    assert (split.network_ms, split.prefill_ms, split.source) == (None, None, "metrics")
    parts = (split.client_ms, split.queue_ms, split.other_ms)
    assert parts == pytest.approx((2.0, 30.0, 90.0))
    assert sum(parts) == pytest.approx(level.of("ttft").mean)
    assert ttft_parts_line([level]).endswith(": 74% not explained, 25% server queue, 2% client")


def test_first_requests_of_users_are_in_the_split_only_where_the_servers_page_counts_them():
    """One of ten waits 0.32 s instead of 0.12: it is no part of the level's TTFT."""
    records = [
        RequestRecord(i, float(i), Exchange(float(i), (i + wait_s, i + 1.0), **stages), at_start=first)
        for i in range(10)
        for first in [i == 0]
        for wait_s in [0.32 if first else 0.12]
        for stages in [{"queue_s": wait_s - 0.06, "prefill_s": 0.04}]
    ]
    spec = LevelSpec(0, Load(concurrency=1), num_requests=10)
    level = summarise_level(LevelRun(spec, 0, records, server=SERVED))
    split = level.ttft_split
    assert (split.requests, split.source) == (9, "answers")
    assert (split.queue_ms, split.network_ms, split.other_ms) == pytest.approx((60.0, 15.0, 5.0))
    parts = (split.queue_ms, split.prefill_ms, split.network_ms, split.other_ms)
    assert sum(parts) == pytest.approx(level.of("ttft").mean)
    untold = [replace(one, exchange=replace(one.exchange, queue_s=None)) for one in records]
    split = summarise_level(LevelRun(spec, 0, untold, server=SERVED)).ttft_split
    assert (split.requests, split.source) == (10, "metrics")
    assert split.network_ms == pytest.approx(140.0 - 100.0)


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
