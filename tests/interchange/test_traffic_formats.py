"""Three requests are the same traffic in every format that servers and gateways write."""

from __future__ import annotations

import csv
import gzip
import io
import json

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.interchange import traffic_rows
from lmi_bench.interchange.traffic import parse_assumed, parse_fields, read_traffic
from lmi_bench.interchange.traffic_statistics import burstiness, hourly_rates_per_s

ISO = ("2026-01-01T00:00:00.500Z", "2026-01-01T00:00:02.500Z", "2026-01-01T00:00:06.500Z")
START_S = 1_767_225_600.5
INPUTS, OUTPUTS = (30, 10, 20), (6, 5, 4)
EXPECTED = [(0.0, 30, 6), (2.0, 10, 5), (6.0, 20, 4)]


def rows(times, name_in, name_out, **more):
    columns = zip(times, INPUTS, OUTPUTS, strict=True)
    return [{"startTime": at, name_in: i, name_out: o, **more} for at, i, o in columns]


def nested(parent, name_in, name_out, **more):
    return [
        {"startTime": at, parent: {name_in: i, name_out: o}, **more}
        for at, i, o in zip(ISO, INPUTS, OUTPUTS, strict=True)
    ]


def json_lines(found):
    return "\n".join(map(json.dumps, found))


def table(found, delimiter=","):
    text = io.StringIO()
    writer = csv.DictWriter(text, found[0].keys(), delimiter=delimiter)
    writer.writeheader()
    writer.writerows({key: json.dumps(v) if isinstance(v, dict) else v for key, v in row.items()} for row in found)
    return text.getvalue()


LITELLM = rows(
    ISO,
    "prompt_tokens",
    "completion_tokens",
    status="success",
    messages={},
    endTime="2026-01-01T00:01:00Z",
    call_type="acompletion",
    cache_hit="False",
)
LANGFUSE = nested(
    "usageDetails",
    "input",
    "output",
    type="GENERATION",
    input='Hi,\n"you"',
    createdAt="2026-02-01T00:00:00Z",
    level="DEFAULT",
)
EPOCHS = {
    scale: rows([round((START_S + after) * scale) for after in (0, 2, 6)], "input", "output")
    for scale in (1e3, 1e6, 1e9)
}
FORMATS = {
    "litellm lines": json_lines(LITELLM),
    "litellm array": json.dumps(LITELLM, indent=1),
    "litellm page": json.dumps({"data": LITELLM, "total": 3}),
    "litellm table": table(LITELLM),
    "langfuse lines": json_lines(LANGFUSE),
    "langfuse array": json.dumps(LANGFUSE),
    "langfuse table": table(LANGFUSE),
    "langfuse usage": json_lines(nested("usage", "input", "output", unit="TOKENS")),
    "langfuse counts": table(rows(ISO, "promptTokens", "completionTokens")),
    "langfuse older": table(rows(ISO, "inputUsage", "outputUsage")),
    "langfuse bucket": json_lines(nested("usage_details", "input", "output")),
    "BurstGPT": table(rows(ISO, "Request tokens", "Response tokens")),
    "flattened": table(rows(ISO, "usage.prompt_tokens", "response.usage.completion_tokens")),
    "lines with a BOM": "\ufeff" + json_lines(LITELLM),
    "semicolons": table(LITELLM, ";"),
    "tabs, BOM, CRLF, no last newline": "\ufeff" + table(LITELLM, "\t").rstrip(),
    "unsorted": json_lines(LITELLM[::-1]),
    "pretty documents": "\n".join(json.dumps(row, indent=1) for row in LITELLM),
    **{f"epoch of {scale:g}": json_lines(found) for scale, found in EPOCHS.items()},
    **{f"epoch of {scale:g}, table": table(found) for scale, found in EPOCHS.items()},
}


def read(tmp_path, text, name="log", **how):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_traffic(path, **how)


def lengths(traffic):
    return [(round(r.at_s, 5), r.input_tokens, r.output_tokens) for r in traffic.requests]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_one_log_agree(tmp_path, name):
    traffic = read(tmp_path, FORMATS[name])
    assert lengths(traffic) == EXPECTED
    assert traffic.start_epoch_s == pytest.approx(START_S, abs=1e-3)
    packed = read(tmp_path, gzip.compress(FORMATS[name].encode()), "log.gz")
    assert packed == traffic


REQUEST = '"POST /v1/chat/completions HTTP/1.1"'
BALANCER = (
    "https 2026-01-01T00:09:0{at}.5Z app/lb/50dc 192.0.2.1:2817 10.0.0.1:80 0.1 4.2 0.0 200 200 34 "
    '366 "POST https://a.example:443/v1/chat/completions HTTP/1.1" "curl" - - arn:aws:tg "Root=1" '
    '"-" "-" 0 2026-01-01T00:00:0{at}.500000Z "forward" "-" "-" "10.0.0.1:80" "200" "-" "-"'
)
WEB = {
    "nginx": f'192.0.2.1 - - [31/Dec/2025:16:00:0{{at}} -0800] {REQUEST} 200 2326 "-" "curl, x"',
    "nginx, own format": f"192.0.2.1 176722560{{at}}.500 0.53 {REQUEST} 200 length=512 sent=99",
    "envoy": f'[2026-01-01T00:00:0{{at}}.500Z] {REQUEST} 200 - 154 0 226 100 "-"',
    "load balancer": BALANCER,
    "nginx, JSON": '{{"time_iso8601": "2026-01-01T01:00:0{at}+01:00", "status": "200", '
    '"request": "POST /v1/completions HTTP/2.0", "request_time": "0.532"}}',
}


ANTHROPIC = {"input_tokens": 3, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 200}
BEDROCK = {"inputTokenCount": 3, "cacheReadInputTokenCount": 1000, "cacheWriteInputTokenCount": 200}
LANGFUSE_CACHED = {"input": 203, "input_cached_tokens": 1000, "output": 20, "output_reasoning_tokens": 500}


@pytest.mark.parametrize(
    "row",
    [
        {"usage": ANTHROPIC | {"output_tokens": 520}},
        {"usage": ANTHROPIC | {"prompt_tokens": 1203, "input_tokens": 1203, "completion_tokens": 520}},
        {"input": BEDROCK, "output": {"outputTokenCount": 520}},
        {"usageDetails": LANGFUSE_CACHED},
        {"usageMetadata": {"promptTokenCount": 1203, "candidatesTokenCount": 20, "thoughtsTokenCount": 500}},
        {"tokens_prompt": 1203, "tokens_completion": 520},
    ],
)
def test_lengths_hold_cached_prompts_and_thoughts(tmp_path, row):
    """Anthropic's input_tokens are those that no cache held, Gemini's candidates have no thoughts."""
    path = tmp_path / "log.jsonl"
    path.write_text(json_lines([{"request_created_at": at, **row} for at in ISO]))
    traffic = read_traffic(path)
    assert {(each.input_tokens, each.output_tokens) for each in traffic.requests} == {(1203, 520)}
    assert traffic.has_times


@pytest.mark.parametrize("name", WEB)
def test_an_access_log_has_times_and_assumed_lengths(tmp_path, name):
    text = "\n".join(WEB[name].format(at=at) for at in (0, 2, 6))
    traffic = read(tmp_path, text, assume=(500, 200))
    assert lengths(traffic) == [(0.0, 500, 200), (2.0, 500, 200), (6.0, 500, 200)]
    assert traffic.start_epoch_s == pytest.approx(START_S, abs=0.6)
    assert traffic.assumed == 3
    with pytest.raises(InputError, match=r"--assume") as found:
        read(tmp_path, text)
    assert ("is an access log" in str(found.value)) == (name != "nginx, JSON")


def test_only_answered_calls_of_an_access_log_count(tmp_path):
    """Two of eight lines: the others are no POST, failed, another API, no request."""
    line = WEB["nginx"].format(at=1)
    lines = [
        line,
        line.replace(":01 ", ":03 "),
        line.replace("POST", "GET"),
        "not a request",
        line.replace(" 200 ", " 503 "),
        line.replace(" 200 ", " 302 "),
        line.replace("chat/completions", "embeddings"),
        line.replace("/v1", "-"),
    ]
    traffic = read(tmp_path, "\n".join(lines), assume=(5, 2))
    assert len(traffic.requests) == 2
    (note,) = (text for text in traffic.notes if text.startswith("left out"))
    assert "6 of 8 lines" in note
    for reason in ("not POST: 1", "failed: 1", "not 2xx: 1", "by path: 1", "no HTTP request: 2"):
        assert reason in note


HEAD = "timestamp,prompt_tokens,completion_tokens\n"
GOOD = "1700000000,10,5\n1700000004,10,5\n"
LEFT_OUT = {
    "not the header's 3 columns": "1700000001,7\n",
    "length outside 1 to 10,000,000": "1700000001,-3,5\n1,NaN,5\n1,inf,5\n1,1e300,5\n1,0,5\n",
    "no prompt or answer length": "1700000001,many,5\n1700000001,,5\n",
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_lines_without_usable_numbers_are_left_out_and_counted(tmp_path, reason):
    traffic = read(tmp_path, HEAD + GOOD + LEFT_OUT[reason])
    assert lengths(traffic) == [(0.0, 10, 5), (4.0, 10, 5)]
    assert any(f"{reason}: {LEFT_OUT[reason].count(chr(10))}" in text for text in traffic.notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + "1700000000,10,5", "a single request"),
        (HEAD + "1700000000,10,5\n" * 3, "all lines have the same time"),
        (HEAD + "soon,10,5\nlater,10,5\n", "such as 'soon'; tried startTime"),
        (HEAD + "1e30,10,5\n-4,10,5\n2023-11-14,1,1\n", "3 of 3 lines have no readable time"),
        ("when,input,output\n1,10,5\n2,10,5\n", "fields seen: when, input, output"),
    ],
)
def test_the_reason_for_an_unknown_rate_is_named(tmp_path, text, why):
    traffic = read(tmp_path, text)
    assert not traffic.has_times
    assert why in traffic.unknown[0]


def test_a_few_lines_without_a_time_do_not_hide_the_rate(tmp_path):
    text = HEAD + "".join(f"{1700000000 + at},10,5\n" for at in range(20)) + "0,10,5\n-,10,5\n"
    traffic = read(tmp_path, text)
    assert len(traffic.requests) == 20
    assert any("no readable time: 2" in note for note in traffic.notes)


def test_repeated_lines_count_once_only_if_an_id_says_so(tmp_path):
    twice = ("a,1700000000.5,10,5\n" + "b,1700000004.5,10,5\n") * 2
    with_ids = read(tmp_path, "id," + HEAD + twice)
    assert len(with_ids.requests) == 2
    without = read(tmp_path, "user," + HEAD + twice)
    assert len(without.requests) == 4
    assert any("2 lines repeat time and lengths" in note for note in without.notes)


def test_fields_are_read_where_the_user_says(tmp_path):
    row = {"at": ISO[0], "u": {"prompt": 8, "reply": 3}, "prompt_tokens": 99, "startTime": ISO[2]}
    later = {**row, "at": ISO[1], "u": {"prompt": 9, "reply": 3}}
    fields = parse_fields("time=at, input=u.prompt,output=u.reply")
    found = read(tmp_path, json_lines([row, later, {**row, "u": {}}]), fields=fields)
    assert lengths(found) == [(0.0, 8, 3), (2.0, 9, 3)]
    with pytest.raises(InputError, match=r"time=when: no line .* fields: at, u\.prompt, u\.reply"):
        read(tmp_path, json_lines([row]), fields={"time": "when"})
    for text in ("when=at", "time", "time=", "time=a,time=b"):
        with pytest.raises(InputError, match=r"write time=NAME"):
            parse_fields(text)
    for text in ("500", "0/5", "5/-1", "a/b", "5/99999999"):
        with pytest.raises(InputError, match=r"such as 500/200"):
            parse_assumed(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (HEAD.encode(), "holds no request"),
        (b"[1, 2]", "holds no request"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0", "is not text"),
        (b"\x1f\x8bnot packed", "cannot read"),
        (gzip.compress((HEAD + GOOD).encode(), mtime=0)[:-12], "cannot read"),
        (b"time,model\n1,m\n2,m\n", "--fields input=NAME,output=NAME, or add --assume"),
    ],
)
def test_a_file_that_holds_no_requests_is_one_clear_line(tmp_path, content, message):
    with pytest.raises(InputError, match=message) as found:
        read(tmp_path, content)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("packed", "length", "message"), [(True, 1500, "over 200 times"), (False, 3000, "a line of over")]
)
def test_a_log_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, packed, length, message):
    monkeypatch.setattr(traffic_rows, "_MOST_LINE", 2000)
    line = json.dumps({"prompt_tokens": 8, "completion_tokens": 4, "x": "a" * length}) + "\n"
    text = (line * 2000).encode()
    with pytest.raises(InputError, match=message):
        read(tmp_path, gzip.compress(text) if packed else text)


def test_other_work_and_cached_answers_are_no_calls(tmp_path):
    others = [
        {**LANGFUSE[0], "type": "SPAN"},
        {**LITELLM[0], "call_type": "aembedding"},
        {**LITELLM[0], "cache_hit": "True"},
        {**LITELLM[0], "status": "failure"},
    ]
    traffic = read(tmp_path, json_lines(LITELLM + others), assume=(5, 2))
    assert lengths(traffic) == EXPECTED


def test_equally_spaced_arrivals_are_more_regular_than_poisson():
    for step_s in (2.0, 0.25):
        found = burstiness([step_s * k for k in range(2000)])
        assert found.shape == 100.0
    assert burstiness([0.5] * 300 + [400.25]).shape is None
    assert burstiness([0.0] * 300 + [400.0]).shape < 1


def test_a_record_of_decades_has_each_hour_of_its_days():
    """A request an hour for ten years and 5.5 hours: each hour of the day has one an hour."""
    times = [3600.0 * k for k in range(10 * 365 * 24 + 6)]
    rates = hourly_rates_per_s([*times, times[-1] + 1800], 0.0)
    assert rates == pytest.approx([1 / 3600] * 24, rel=1e-3)
