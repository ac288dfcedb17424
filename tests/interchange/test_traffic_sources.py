"""Logs, traces and metrics are read as traffic; what they cannot tell is said."""

from __future__ import annotations

import json

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.interchange.prometheus import read_metrics
from lmi_bench.interchange.traffic import read_traffic


def log(tmp_path, rows):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lengths(traffic):
    return [(each.at_s, each.input_tokens, each.output_tokens) for each in traffic.requests]


def test_a_gateways_log_is_read_by_its_usage(tmp_path):
    rows = [
        {"created": 1_700_000_002, "usage": {"prompt_tokens": 20, "completion_tokens": 6}},
        {"created": 1_700_000_000, "usage": {"prompt_tokens": 10, "completion_tokens": 5}},
    ]
    traffic = read_traffic(log(tmp_path, rows))
    assert lengths(traffic) == [(0.0, 10, 5), (2.0, 20, 6)]
    assert traffic.start_epoch_s == 1_700_000_000
    assert any("shared prefixes" in text for text in traffic.unknown)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1_700_000_000_000, 1_700_000_001_500),
        ("2023-11-14T22:13:20Z", "2023-11-14T22:13:21.500Z"),
        ("2023-11-14T22:13:20+00:00", "2023-11-14T23:13:21.500+01:00"),
    ],
)
def test_times_in_ms_or_as_dates_are_the_same_instants(tmp_path, first, second):
    rows = [{"timestamp": at, "input_tokens": 3, "output_tokens": 2} for at in (first, second)]
    traffic = read_traffic(log(tmp_path, rows))
    assert [each.at_s for each in traffic.requests] == pytest.approx([0.0, 1.5])
    assert traffic.start_epoch_s == pytest.approx(1_700_000_000)


def test_texts_stand_for_counts_and_their_beginning_is_shared(tmp_path):
    """40 characters of system prompt and its role, four a token; answers of 8 are two."""
    system = {"role": "system", "content": "s" * 40}
    rows = [
        {
            "ts": at,
            "request": {"messages": [system, {"role": "user", "content": f"{at}"}]},
            "response": {"choices": [{"message": {"content": "12345678"}}]},
        }
        for at in (5.0, 9.0)
    ]
    traffic = read_traffic(log(tmp_path, rows))
    assert [each.output_tokens for each in traffic.requests] == [2, 2]
    assert traffic.prefix.common == round(len("system: " + "s" * 40 + "\nuser: ") / 4)
    assert any("4 characters" in text for text in traffic.notes)
    assert any("hour of the day" in text for text in traffic.unknown)


def test_failed_requests_are_left_out_and_counted(tmp_path):
    good = {"time": 1.0, "input_tokens": 3, "output_tokens": 2}
    rows = [good, {**good, "time": 2.0}, {**good, "status": 500}, {**good, "output_tokens": 0}]
    traffic = read_traffic(log(tmp_path, rows))
    assert len(traffic.requests) == 2
    assert any(text.startswith("left out: 2 of 4 lines") for text in traffic.notes)


def test_without_times_there_is_no_rate(tmp_path):
    traffic = read_traffic(log(tmp_path, [{"input_tokens": 3, "output_tokens": 2}] * 3))
    assert not traffic.has_times
    assert any(text.startswith("rate, bursts") for text in traffic.unknown)


def test_a_log_without_lengths_says_what_is_looked_for(tmp_path):
    with pytest.raises(InputError, match="0 of 2 lines are requests with prompt"):
        read_traffic(log(tmp_path, [{"time": 1}, {"time": 2}]))


def test_a_line_that_is_not_json_is_counted(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"time": 1}\nnonsense\n', encoding="utf-8")
    with pytest.raises(InputError, match="not JSON: 1"):
        read_traffic(path)


def test_equal_blocks_of_a_trace_are_a_shared_prefix(tmp_path):
    """Two of three prompts begin with blocks 1 and 2, of 512 tokens each."""
    rows = [
        {"timestamp": at, "input_length": 1100, "output_length": 9, "hash_ids": ids}
        for at, ids in ((0, [1, 2, 3]), (1000, [1, 2, 4]), (2000, [5, 6, 7]))
    ]
    traffic = read_traffic(log(tmp_path, rows))
    assert traffic.prefix.common == 1024
    assert traffic.prefix.repeated == pytest.approx(2 / 9)


@pytest.mark.parametrize(
    ("first_ms", "start_epoch_s"), [(0, None), (99_999_500, None), (1_700_000_000_000, 1_700_000_000)]
)
def test_a_trace_of_blocks_is_in_ms_from_its_beginning_or_since_1970(tmp_path, first_ms, start_epoch_s):
    rows = [
        {"timestamp": first_ms + ms, "input_length": 600, "output_length": 9, "hash_ids": [1, ms]}
        for ms in (0, 1500, 4000)
    ]
    traffic = read_traffic(log(tmp_path, rows))
    assert [each.at_s for each in traffic.requests] == pytest.approx([0.0, 1.5, 4.0])
    assert traffic.start_epoch_s == start_epoch_s


def test_the_blocks_of_a_trace_are_as_long_as_its_lengths_say(tmp_path):
    """40 ids for 640 tokens: blocks of 16, of which 30 begin all prompts alike."""
    rows = [
        {
            "timestamp": 100 * at,
            "input_length": 640,
            "output_length": 9,
            "hash_ids": [*range(30), *range(100 * at + 100, 100 * at + 110)],
        }
        for at in range(20)
    ]
    assert read_traffic(log(tmp_path, rows)).prefix.common == 480
    for size in (None, "x", [], 0):
        odd = [row | {"block_size": size} for row in rows]
        if size is not None:
            with pytest.raises(InputError, match=r"block_size must be a whole number above 0"):
                read_traffic(log(tmp_path, odd))


def test_a_chat_with_an_image_is_a_request_and_a_drawing_is_none(tmp_path):
    kinds = ("text", "image", "file", "search", "image_generation")
    rows = [
        {"chat_id": at, "timestamp": at, "input_length": 32, "output_length": 9, "type": kind}
        for at, kind in enumerate(kinds)
    ]
    assert len(read_traffic(log(tmp_path, rows)).requests) == 4


def test_lines_of_a_programs_log_are_not_a_load_balancers(tmp_path):
    path, calls = tmp_path / "access.log", '"POST /v1/completions HTTP/1.1"'
    path.write_text(
        f"2026-01-01T00:00:00Z INFO access.py:123 {calls} 200\n"
        f"2026-01-01T00:00:01Z INFO 10.0.0.1:5000 - {calls} 500\n"
        f"2026-01-01T00:00:02Z INFO 10.0.0.1:5000 - {calls} 200\n"
    )
    assert len(read_traffic(path, assume=(500, 200)).requests) == 2


def test_a_date_that_is_none_and_a_table_of_nothing_are_no_fault(tmp_path):
    rows = [
        {"created_at": at, "prompt_tokens": 9, "completion_tokens": 3}
        for at in ("0001-01-01T00:00:00Z", *[f"2026-01-01T00:00:{s:02d}Z" for s in range(12)])
    ]
    assert len(read_traffic(log(tmp_path, rows)).requests) == 12
    path = tmp_path / "nothing.csv"
    path.write_text(",\n,\n")
    with pytest.raises(InputError, match="holds no request"):
        read_traffic(path)


PAGE = """# HELP vllm:request_prompt_tokens ...
vllm:request_prompt_tokens_bucket{model_name="m",le="100"} 30
vllm:request_prompt_tokens_bucket{model_name="m",le="200"} 40
vllm:request_prompt_tokens_bucket{model_name="m",le="+Inf"} 40
vllm:request_generation_tokens_bucket{model_name="m",le="10"} 20
vllm:request_generation_tokens_bucket{model_name="m",le="30"} 40
vllm:request_generation_tokens_bucket{model_name="m",le="+Inf"} 40
"""


def test_a_page_of_metrics_gives_lengths_and_says_that_it_knows_no_rate():
    """30 of 40 prompts in 0 to 100, 10 in 100 to 200; answers half in 0 to 10, half in 10 to 30."""
    found = read_metrics("http://host/metrics", fetch=lambda _url: PAGE)
    assert [(k.input_tokens, k.output_tokens, k.share) for k in found.kinds] == [
        (50, 5, 0.375),
        (50, 20, 0.375),
        (150, 5, 0.125),
        (150, 20, 0.125),
    ]
    assert (found.peak_per_s, found.mean_per_s, found.hourly_per_s) == (None, None, ())
    assert any(text.startswith("rate and daily curve") for text in found.unknown)
    assert any("separately" in text for text in found.unknown)


def test_models_with_buckets_of_their_own_make_one_whole_mix():
    """All of a's prompts are at most 2,000 tokens long; only b has a bucket of 5,000."""
    name = "vllm:request_prompt_tokens_bucket"
    counts = {"a": {"2000": 100, "+Inf": 100}, "b": {"2000": 50, "5000": 100, "+Inf": 100}}
    page = PAGE[PAGE.index("vllm:request_generation") :] + "".join(
        f'{name}{{role="x",model_name="{model}",le="{le}"}} {count}\n'
        for model, buckets in counts.items()
        for le, count in buckets.items()
    )
    kinds = read_metrics("http://host/metrics", fetch=lambda _url: page).kinds
    assert sum(kind.share for kind in kinds) == pytest.approx(1)
    assert {kind.input_tokens for kind in kinds} >= {1000}


def test_a_prometheus_server_also_knows_the_rate():
    def answer(url):
        if "query_range" in url:
            result = [{"metric": {}, "values": [[0, "1.5"], [300, "2.5"], [600, "NaN"]]}]
        elif "tgi_request_input_length" in url:
            result = [{"metric": {"le": "100"}, "value": [0, "4"]}]
        elif "tgi_request_generated_tokens" in url:
            result = [{"metric": {"le": "20"}, "value": [0, "4"]}]
        else:
            result = []
        return json.dumps({"status": "success", "data": {"result": result}})

    found = read_metrics("http://host:9090", fetch=answer)
    assert found.notes == ("lengths from the metrics of TGI",)
    assert (found.peak_per_s, found.mean_per_s) == (2.5, 2.0)
    assert found.hourly_per_s == (2.0, *[None] * 23)
    assert [(k.input_tokens, k.output_tokens) for k in found.kinds] == [(50, 10)]


def test_a_server_of_something_else_is_refused():
    with pytest.raises(InputError, match="does not answer like a Prometheus server"):
        read_metrics("http://host:9090", fetch=lambda _url: "<html>")
    with pytest.raises(InputError, match="has no metrics of vLLM, TGI, SGLang"):
        read_metrics("http://host:9090", fetch=lambda _url: '{"data": {"result": []}}')
    for result in ([{"value": [0, "4"]}], [{"metric": {"le": "1"}, "value": [0, "x"]}], [None]):
        answer = json.dumps({"data": {"result": result}})
        with pytest.raises(InputError, match="does not answer like a Prometheus server"):
            read_metrics("http://host:9090", fetch=lambda _url, answer=answer: answer)
    with pytest.raises(InputError, match="does not answer: nonnumeric port"):
        read_metrics("http://127.0.0.1:90x0")
    with pytest.raises(InputError, match="write prometheus:http"):
        read_metrics("file:///etc/passwd")
