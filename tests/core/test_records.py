"""Records: what a request leaves, however it ended."""

from __future__ import annotations

import tracemalloc

import pytest

from lmi_bench.core.errors import TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord, request_line
from lmi_bench.core.workload import PlannedRequest

REQUEST = PlannedRequest(5, 0.0, input_tokens=8, output_tokens=4)


def test_counts_are_one_a_time_where_left_out_and_never_disagree():
    assert Exchange(0.0, (1.0, 2.0)).token_counts == (1, 1)
    with pytest.raises(ValueError, match="2 token times but 1 counts"):
        Exchange(0.0, (1.0, 2.0), (1,))


def test_the_servers_counts_win_over_counted_events():
    exchange = Exchange(0.5, (1.0, 2.0), input_tokens=9, output_tokens=7)
    record = RequestRecord.completed(REQUEST, 0.0, exchange)
    assert (record.input_tokens, record.output_tokens) == (9, 7)
    counted = RequestRecord.completed(REQUEST, 0.0, Exchange(0.5, (1.0, 2.0), (3, 1)))
    assert (counted.input_tokens, counted.output_tokens) == (8, 4)


def test_a_failed_request_keeps_what_had_arrived():
    error = TargetError("broken_stream", "closed", exchange=Exchange(0.5, (1.0,)))
    record = RequestRecord.failed(REQUEST, 0.25, error)
    assert not record.ok
    assert (record.status, record.error) == ("broken_stream", "closed")
    assert (record.due_s, record.sent_s, list(record.token_times_s)) == (0.25, 0.5, [1.0])


def test_a_request_that_never_left_was_sent_when_it_was_tried():
    record = RequestRecord.failed(REQUEST, 0.25, TargetError("connect", "refused"), sent_s=0.5)
    assert (record.sent_s, list(record.token_times_s), record.output_tokens) == (0.5, [], 0)


def test_shifting_moves_every_time_alike():
    record = RequestRecord(0, 10.0, Exchange(11.0, (12.0, 13.0), ended_s=13.5)).shifted(10.0)
    assert (record.due_s, record.sent_s, record.ended_s) == (0.0, 1.0, 3.5)
    assert list(record.token_times_s) == [2.0, 3.0]


def test_an_event_is_kept_in_a_dozen_bytes():
    times_s, counts = [float(event) for event in range(100)], [1] * 100
    tracemalloc.start()
    kept = [Exchange(0.0, [at_s + i for at_s in times_s], list(counts)) for i in range(100)]
    line = request_line(0, 1, RequestRecord(0, 0.0, kept[0]), ())
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 100 * 100 * 14
    assert (line["token_times_s"], line["token_counts"]) == (times_s, counts)
    odd = Exchange(0.0, (1.0, 2.0), (1, 3))
    assert (list(odd.token_times_s), odd.token_counts) == ([1.0, 2.0], (1, 3))
