"""A level's line: read into a value and written back byte for byte."""

from __future__ import annotations

import json
import math

import orjson
import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.level import LATENCY_KEY, Judgement, Level
from lmi_bench.core.load import Load

LINE = {
    "level": 2,
    "attempt": 1,
    "stopped_by": None,
    "concurrency": 8,
    "rate_per_s": None,
    "of_a_newer_version": {"a": [1, 2]},
    "requests": 24,
    "errors": 1,
    "throughput_tokens_per_s": 100,
    "valid": True,
    "ttft_ms": {"mean": 40.5, "p50": 39, "p99": None, "n": 23, "unsupported": {"p99": "few"}},
    "tls_ms": None,
    "generator": {},
    "server": {"running": {"max": 3.0, "mean": 1.5}, "prompt_tokens": 7.0},
    "search": {"ratio": None, "passed": False, "binding": "ttft_p90<=1000ms", "planned": 24},
}


def same_bytes(line):
    return orjson.dumps(Level.from_json(line, "a line").to_json()) == orjson.dumps(line)


def test_a_line_is_written_back_with_its_keys_in_their_order_and_those_of_newer_versions():
    assert same_bytes(LINE)
    assert same_bytes(dict(reversed(LINE.items())))


@pytest.mark.parametrize(
    "key", [key for key in LINE if key not in ("level", "attempt", "concurrency")]
)
def test_a_line_without_a_key_stays_without_it(key):
    assert same_bytes({name: value for name, value in LINE.items() if name != key})


def test_what_a_line_says_is_read_as_attributes():
    level = Level.from_json(LINE)
    assert (level.index, level.load, level.name) == (2, Load(concurrency=8), "concurrency 8")
    assert (level.completed, level.of("ttft").mean, level.of("itl").mean) == (23, 40.5, None)
    assert level.of("ttft").why_missing("p99") == "few"
    assert level.server.running.mean == 1.5
    assert level.search.ratio == math.inf


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"level": None}, "line 3: level must be a whole number"),
        ({"requests": "many"}, "line 3: requests must be a whole number, not 'many'"),
        ({"concurrency": None}, "line 3: concurrency, rate_per_s: a level has either"),
        ({"ttft_ms": {"p50": [1]}}, r"line 3: ttft_ms: p50 must be a number, not \[1\]"),
        ({"ttft_ms": 5}, "line 3: ttft_ms must be an object, not 5"),
        ({"valid": 1}, "line 3: valid must be true or false"),
    ],
)
def test_a_damaged_line_is_refused_with_its_place_and_field(change, said):
    with pytest.raises(InputError, match=said):
        Level.from_json({**LINE, **change}, "levels.jsonl: line 3")


def test_a_judgement_without_an_end_is_null_in_json():
    judgement = Judgement(passed=False, ratio=math.inf, binding="e2e_p90<=1s", planned=None)
    content = judgement.to_json()
    assert content["ratio"] is None
    assert Judgement.from_json(json.loads(json.dumps(content))) == judgement


def test_a_key_of_the_file_is_named_for_each_metric():
    assert LATENCY_KEY["latency_per_token"] == "latency_ms_per_token"
    assert LATENCY_KEY["ttft_from_sent"] == "ttft_from_sent_ms"
