"""Recorded traffic: columns of two public traces, stretched to a rate."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.traces import TraceRequest, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,396,109
2023-11-16 18:15:50.6805900,879,55
2023-11-16 18:15:48.6805900,91,0
"""
MOONCAKE = (
    '{"timestamp": 500, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 0, "input_length": 7319, "output_length": 490, "hash_ids": [0, 2]}\n'
)


def trace_of(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path)


def test_an_azure_trace_counts_from_its_first_request(tmp_path):
    trace = trace_of(tmp_path, AZURE)
    assert [r.at_s for r in trace.requests] == pytest.approx([0, 1, 4], abs=1e-5)
    assert trace.requests[2].input_tokens == 879
    assert trace.rate_per_s == pytest.approx(2 / 4)


def test_a_mooncake_trace_is_in_milliseconds_and_put_in_order(tmp_path):
    trace = trace_of(tmp_path, MOONCAKE)
    assert trace.requests == (
        TraceRequest(0.0, 7319, 490, hash_ids=(0, 2)),
        TraceRequest(0.5, 6755, 500, hash_ids=(0, 1)),
    )


def test_a_trace_is_stretched_to_another_rate(tmp_path):
    """Twice the rate halves every time."""
    trace = trace_of(tmp_path, AZURE)
    assert trace.due_s(2, 2 * trace.rate_per_s) == pytest.approx(2, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "needs the columns TIMESTAMP"),
        ('{"x": 1}\n', "JSON lines need the keys timestamp"),
        ("{broken\n", "neither JSON lines nor"),
        (MOONCAKE.splitlines()[0] + "\n", "no two requests at different times"),
        (MOONCAKE.replace("7319", '"many"'), "request 2 cannot be read"),
    ],
)
def test_what_is_no_trace_says_why(tmp_path, text, why):
    with pytest.raises(InputError, match=why):
        trace_of(tmp_path, text)
