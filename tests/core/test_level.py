"""A level's line: read into a value and written back byte for byte."""

from __future__ import annotations

import json
import math
from pathlib import Path

import orjson
import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import LATENCY_KEY, Judgement, Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.workload import LevelSpec

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


@pytest.mark.parametrize("key", [key for key in LINE if key not in ("level", "attempt", "concurrency")])
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


def test_every_key_of_a_level_is_listed_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "run_files.md").read_text()
    section = text[text.index("## levels.jsonl") : text.index("## knees.json")]
    assert [key for key in Level.slots() if f"`{key}`" not in section] == []


def test_a_level_that_was_just_measured_is_read_back_as_it_was_written():
    records = tuple(RequestRecord(i, 0.0, Exchange(0.0, (0.1 * (i + 1), 2.0)), input_tokens=8) for i in range(30))
    for load in (Load(concurrency=4), Load(rate_per_s=2.5)):
        measured = summarise_level(LevelRun(LevelSpec(3, load, num_requests=30), 2, records))
        line = orjson.dumps(measured.to_json(), option=orjson.OPT_SERIALIZE_NUMPY)
        assert orjson.dumps(Level.from_json(orjson.loads(line)).to_json()) == line


def kept_lines():
    """The level lines of the golden outputs: simulated sweeps of every kind of load."""
    for path in sorted((Path(__file__).parents[1] / "golden" / "outputs").rglob("levels.jsonl.txt")):
        text, decoder = path.read_text(), json.JSONDecoder()
        while text := text.lstrip():
            line, end = decoder.raw_decode(text)
            yield line
            text = text[end:]


def test_every_line_of_the_golden_sweeps_is_written_back_byte_for_byte():
    masked = ("elapsed_s", "spent_usd")
    lines = [{k: v for k, v in line.items() if k not in masked} for line in kept_lines()]
    assert len(lines) > 50
    assert [line for line in lines if not same_bytes(line)] == []
