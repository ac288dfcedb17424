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
    '{"timestamp": 500, "input_length": 755, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 0, "input_length": 1019, "output_length": 490, "hash_ids": [0, 2]}\n'
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
        TraceRequest(0.0, 1019, 490, hash_ids=(0, 2)),
        TraceRequest(0.5, 755, 500, hash_ids=(0, 1)),
    )


AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
2024-05-10 01:00:01.25+01:00,70,9
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""


def test_azures_later_trace_has_a_time_zone_and_may_lack_fractions(tmp_path):
    trace = trace_of(tmp_path, AZURE_2024)
    assert [r.at_s for r in trace.requests] == pytest.approx([0, 0.99007, 1.24007])


def test_burstgpt_is_in_seconds_and_failures_are_left_out(tmp_path):
    assert trace_of(tmp_path, BURSTGPT).requests == (TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276))


def test_agent_sessions_are_no_trace_and_the_message_says_where_they_go(tmp_path):
    with pytest.raises(InputError, match="--agent-trace"):
        trace_of(tmp_path, '{"id": "x", "requests": [], "block_size": 64}')


BAILIAN = """{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, LENGTHS, "hash_ids": IDS}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 121.5, LENGTHS, "hash_ids": IDS}
{"chat_id": 161, "parent_chat_id": -1, "timestamp": 181.0, LENGTHS, "hash_ids": IDS}
""".replace("LENGTHS", '"input_length": 521, "output_length": 132, "type": "text", "turn": 1').replace(
    "IDS", str(list(range(33)))
)


def test_a_bailian_trace_is_in_seconds_with_blocks_of_16(tmp_path):
    """521 tokens are 32 blocks of 16 and a part of one: 33 ids."""
    trace = trace_of(tmp_path, BAILIAN)
    assert [r.at_s for r in trace.requests] == pytest.approx([0.0, 60.386, 119.886])
    assert trace.block_tokens == 16


def test_the_block_size_is_the_one_that_the_lengths_fit(tmp_path):
    """1,019 and 755 tokens with 8 and 6 ids are blocks of 128; a stated size must fit, too."""
    ids = MOONCAKE.replace("[0, 2]", "[0, 1, 2, 3, 4, 5, 6, 7]").replace("[0, 1]", "[9, 1, 2, 3, 4, 5]")
    assert trace_of(tmp_path, ids).block_tokens == 128
    stated = ids.replace('"timestamp"', '"block_size": 64, "timestamp"')
    with pytest.raises(InputError, match=r"blocks of 64 tokens, such as 1,019 .* 8 hash ids"):
        trace_of(tmp_path, stated)


def test_hash_ids_that_fit_no_block_size_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no other size fits all: state `block_size`"):
        trace_of(tmp_path, MOONCAKE.replace("[0, 1]", "[0, 1, 3, 4, 5, 6, 7, 8]"))


def test_a_trace_is_stretched_to_another_rate(tmp_path):
    """Twice the rate halves every time."""
    trace = trace_of(tmp_path, AZURE)
    assert trace.due_s(2, 2 * trace.rate_per_s) == pytest.approx(2, abs=1e-5)


def test_a_trace_that_starts_over_keeps_its_rate(tmp_path):
    trace = trace_of(tmp_path, AZURE)
    number = len(trace.requests)
    gaps_s = [trace.due_s(number + n, 4.0) - trace.due_s(n, 4.0) for n in range(number)]
    assert gaps_s == pytest.approx([number / 4.0] * number)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "needs the columns TIMESTAMP"),
        ('{"x": 1}\n', "JSON lines need the keys timestamp"),
        ("{broken\n", "neither JSON lines nor"),
        (MOONCAKE.splitlines()[0] + "\n", "no two requests at different times"),
        (MOONCAKE.replace("1019", '"many"'), "request 2 cannot be read"),
        *(
            (
                MOONCAKE.replace('"timestamp"', f'"block_size": {size}, "timestamp"'),
                "block_size must be a whole number above 0",
            )
            for size in ("0", '"x"', "[]", "1e400", "-16", "true")
        ),
    ],
)
def test_what_is_no_trace_says_why(tmp_path, text, why):
    with pytest.raises(InputError, match=why):
        trace_of(tmp_path, text)
