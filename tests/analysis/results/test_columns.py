"""A level's requests as columns, against the latencies of each request by itself."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.slo_results import goodput, statistic_ms
from lmi_bench.core.exchange import Exchange, packed
from lmi_bench.core.records import RequestRecord, StoredRecords, request_line
from lmi_bench.core.slo import METRICS, parse_slo


def odd_records(seed):
    """Requests of every shape: failed with and without tokens, of one event, with events that
    carry several tokens or none, counted differently by the server, not streamed, empty."""
    rng = random.Random(seed)
    records = []
    for number in range(60):
        due_s = rng.uniform(0, 5)
        sent_s = due_s + rng.choice([0.0, 0.01])
        events = rng.choice([0, 1, 1, 2, 5, 9])
        times = sorted(sent_s + rng.uniform(0.01, 2) for _ in range(events))
        counts = tuple(rng.choice([0, 1, 1, 1, 3]) for _ in times)
        status = rng.choice(["ok", "ok", "ok", "timeout"])
        ended_s = rng.choice([None, sent_s + 2.5])
        streamed = rng.random() < 0.8
        exchange = Exchange(sent_s, tuple(times), counts, ended_s=ended_s, streamed=streamed)
        tokens = rng.choice([0, 0, 1, 7])
        at_start = rng.random() < 0.2
        records.append(RequestRecord(number, due_s, exchange, 8, tokens, status, at_start=at_start))
    return tuple(records)


def by_itself_ms(record, metric, *, open_loop):
    """A metric's values of one request, one after the other by its definition."""
    events = zip(record.token_times_s, record.exchange.token_counts, strict=True)
    times = [at_s for at_s, count in events if count]
    tokens = record.output_tokens
    start_s = record.due_s if open_loop else record.sent_s
    end_s = times[-1] if times else record.ended_s
    has_gaps = len(times) > 1 and tokens > 1
    if metric == "e2e":
        found = [] if end_s is None else [end_s - start_s]
    elif metric == "ttft":
        found = [times[0] - start_s] if times and record.exchange.streamed else []
    elif metric == "tpot":
        found = [(times[-1] - times[0]) / (tokens - 1)] if has_gaps else []
    elif metric == "latency_per_token":
        found = [(end_s - start_s) / tokens] if times and tokens else []
    else:
        found = [after - before for before, after in pairwise(times)] if has_gaps else []
    return np.array(found) * 1e3


def wall_s(records):
    """First send to last event; of failures, and of answers without an event, to their end too."""
    ends = [at_s for each in records for at_s in each.token_times_s]
    ends += [e.ended_s for e in records if not (e.ok and e.token_times_s) and e.ended_s is not None]
    return max(ends) - min(each.sent_s for each in records)


def stored(records):
    lines = [request_line(0, 1, record, ()) for record in records]
    for line in lines:
        line["token_times_s"], line["token_counts"] = packed(line["token_times_s"], line["token_counts"])
    return StoredRecords(lines)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("open_loop", [False, True])
@pytest.mark.parametrize("kept", [tuple, stored])
def test_each_value_is_that_of_the_request_by_itself(metric, open_loop, kept):
    for seed in range(5):
        records = kept(odd_records(seed))
        found, rows = columns_of(records).values_ms(metric, open_loop=open_loop)
        for row, record in enumerate(records):
            alone = by_itself_ms(record, metric, open_loop=open_loop)
            expected = alone if record.ok and not record.at_start else []
            np.testing.assert_array_equal(found[rows == row], expected)
        assert columns_of(records).wall_s == wall_s(records)


@pytest.mark.parametrize("limits", [["itl_p90<=300ms"], ["itl_mean<=300ms", "ttft_p50<=900ms"], []])
def test_goodput_counts_the_requests_that_meet_each_limit_by_themselves(limits):
    slos = [parse_slo(text) for text in limits]
    for seed in range(5):
        records = odd_records(seed)
        good = unknown = 0
        for record in records:
            values = [(by_itself_ms(record, slo.metric, open_loop=True), slo) for slo in slos]
            meets = (
                record.ok
                and not record.at_start
                and all(not own.size or statistic_ms(own, slo.statistic) <= slo.limit_ms for own, slo in values)
            )
            in_one = not record.exchange.streamed and record.output_tokens > 1
            hidden = meets and in_one and any(not own.size for own, _ in values)
            good, unknown = good + (meets and not hidden), unknown + hidden
        found = goodput(records, slos, open_loop=True)
        judged = sum(not record.at_start for record in records) - unknown
        assert (found.good, found.requests) == (good, judged)


def test_no_request_has_no_value_and_takes_no_time():
    columns = columns_of(())
    assert columns.values_ms("itl", open_loop=False)[0].size == 0
    assert columns.wall_s == 0.0


def test_stored_records_are_those_that_were_written():
    records = odd_records(1)
    kept = stored(records)
    assert kept == stored(records)
    assert len(kept) == len(records)
    assert [each.request_id for each in kept] == [each.request_id for each in records]
    assert kept[3] == next(iter(kept[3:4])) == list(kept)[3]
    assert kept[-2:] == tuple(kept)[-2:]
