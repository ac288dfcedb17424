"""The scenario file: defaults, all mistakes at once, overrides, the hash that guards resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import Scenario, load_scenario, parse_scenario
from lmi_bench.loadgen.run.sweep import levels_of

SHIPPED = sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))

# begin of the hash with which a run of an earlier release began: it has to go on
HASHES = {
    "chat-256-256": "4448b4cc9b9ad56f",
    "classify-256-32": "18bb345f97835e95",
    "code-15-500": "202f2db156e3900d",
    "generate-32-128": "53973fbebf8c9b6e",
    "long-context-3840-256": "d5a371e2a90b7d49",
    "mixed-20-500": "372783bcd2a71aea",
    "question-answering": "6216612c72d9ec9a",
    "questions-622-250": "54eb2c020c7f3b46",
    "quickstart": "73ab84f330cef7f4",
    "summary-500-100": "5145d671c520389d",
}
TIMED = ("chat-256-256", "long-context-3840-256")  # once with timeout_s: 60, now --timeout 60
STATED_HASHES = [
    ({}, "4de8bc88db1c672c"),
    ({"load.rate_per_s": [1, 2.5], "load.arrivals": "gamma", "load.burstiness": 0.5}, "4cbcb358d87280df"),
    ({"target": "http://x:1", "model": "m", "stream": False}, "74a84bddd2d82abd"),
    (
        {
            "engine.policy": "dynamic",
            "engine.batch_size": 8,
            "engine.tensor_parallel": "max",
            "engine.quantize": "awq",
            "engine.draft": "ngram",
        },
        "ccbab9e515483bc0",
    ),
    ({"load.search": "rate", "slo": ["ttft_p90<=1s"]}, "548e9a7961c734c4"),
    ({"client.connections": 4, "client.first_token_timeout_s": 3.0}, "ba892604ee04f429"),
    ({"workload.agents": "", "workload.begins_within": True}, "a52f55d5f19eb6af"),
    ({"workload.turns": 3, "workload.think_s": 2}, "8f377d96f23df7bd"),
]

SOURCES = ("agents", "agent_trace", "trace", "dataset", "conversations")
SHORTEST = """
model: demo-15m
workload: {input_tokens: 256, output_tokens: 256}
load: {concurrency: [1, 2, 4, 8], requests_per_user: 3}
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_more_users_than_tasks_can_be_are_refused():
    """A typo's 999,999,999,999 users began no level and ended no start."""
    with pytest.raises(InputError, match=r"load\.concurrency.*1000000"):
        parse_scenario({"load": {"concurrency": [999_999_999_999]}})
    assert parse_scenario({"load": {"concurrency": [1_000_000]}}).load.concurrency == (1_000_000,)


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", 0), ("num_blocks", 0), ("threads", 0), ("memory_share", 0.0), ("memory_share", 1.01)],
)
def test_sizes_of_the_engine_are_checked_before_it_loads_a_model(name, value):
    with pytest.raises(InputError, match=rf"engine\.{name}"):
        parse_scenario({"engine": {name: value}})


def test_the_shortest_scenario_is_whole(tmp_path):
    scenario = load_scenario(_file(tmp_path, SHORTEST))
    assert scenario.target == "engine"
    assert scenario.timeout_s is None
    assert [level.num_requests for level in levels_of(scenario)] == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"target": "sagemaker:mine"}, 480.0),
        ({"target": "sagemaker:mine", "stream": False}, 60.0),
        ({"target": "sagemaker:mine", "timeout_s": 5}, 5.0),
        ({"target": "http://host:8000"}, None),
        ({"target": "sim:ml.g5.2xlarge"}, None),
        ({}, None),
    ],
)
def test_only_sagemaker_has_a_time_out_of_its_own(fields, seconds):
    """Documented limits of an invocation: 60 s, and 8 minutes for a response stream."""
    assert parse_scenario(fields).timeout_s == seconds


def test_an_empty_file_is_the_default_scenario(tmp_path):
    assert load_scenario(_file(tmp_path, "")) == Scenario()


def test_an_unknown_field_names_the_nearest_known_one():
    with pytest.raises(InputError, match=r"workload\.input_token: .*did you mean input_tokens"):
        parse_scenario({"workload": {"input_token": 4}})


def test_a_field_in_the_wrong_section_names_its_place():
    with pytest.raises(InputError, match=r"concurrency: .*did you mean load\.concurrency"):
        parse_scenario({"concurrency": [1]})


def test_every_mistake_is_reported_at_once():
    with pytest.raises(InputError) as caught:
        parse_scenario(
            {
                "modle": "x",
                "workload": {"input_tokens": 0},
                "load": {"concurrency": [1, -2], "arrivals": "bursty"},
                "slo": ["ttft<1"],
                "timeout_s": 0,
            }
        )
    text = str(caught.value)
    assert "6 mistakes" in text
    for place in ("modle", "workload.input_tokens", "load.concurrency.1", "load.arrivals", "slo", "timeout_s"):
        assert place in text


def test_a_concurrency_and_a_rate_exclude_each_other():
    with pytest.raises(InputError, match="either concurrency or rate_per_s"):
        parse_scenario({"load": {"concurrency": [1], "rate_per_s": [1.0]}})


def test_text_that_is_not_a_mapping_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected fields"):
        load_scenario(_file(tmp_path, "- 1\n- 2\n"))


def test_broken_yaml_and_a_missing_file_are_input_errors(tmp_path):
    with pytest.raises(InputError, match="not YAML"):
        load_scenario(_file(tmp_path, "load: {concurrency: [1"))
    with pytest.raises(InputError, match="cannot read"):
        load_scenario(tmp_path / "absent.yaml")


def test_yaml_tags_run_no_code(tmp_path):
    with pytest.raises(InputError, match="not YAML"):
        load_scenario(_file(tmp_path, "model: !!python/object/apply:os.getcwd []"))


def test_an_override_wins_and_is_checked():
    scenario = Scenario().with_overrides({"load.concurrency": [3], "seed": 7, "model": None})
    assert scenario.load.concurrency_levels == (3,)
    assert scenario.seed == 7
    assert scenario.model == Scenario().model
    with pytest.raises(InputError, match=r"workload\.input_tokens"):
        scenario.with_overrides({"workload.input_tokens": 0})
    with pytest.raises(InputError, match="did you mean load"):
        scenario.with_overrides({"laod.concurrency": [1]})


def test_a_rate_override_replaces_the_concurrency_of_the_file():
    scenario = parse_scenario({"load": {"concurrency": [1, 2]}})
    rate = scenario.with_overrides({"load.rate_per_s": [0.5]})
    assert [level.rate_per_s for level in levels_of(rate)] == [0.5]
    assert levels_of(rate.with_overrides({"load.concurrency": [4]}))[0].concurrency == 4


def test_the_hash_follows_what_is_measured_and_nothing_else():
    base = Scenario().hash()
    assert parse_scenario({"model": "demo-15m", "load": {"warmup_requests": 1}}).hash() == base
    assert parse_scenario({"name": "another", "slo": "ttft_p90<=1s"}).hash() == base
    assert parse_scenario({"seed": 1}).hash() != base
    assert parse_scenario({"engine": {"max_rolling_batch_size": 4}}).hash() != base


def test_a_cap_of_nothing_is_not_no_cap(tmp_path):
    """Without any pause the load is another one, which no run may go on with."""
    (tmp_path / "agents.jsonl").write_text("{}")
    workload = {"agent_trace": str(tmp_path / "agents.jsonl")}
    hashes = {
        parse_scenario({"workload": workload | more}).hash() for more in ({}, {"idle_cap_s": 0}, {"idle_cap_s": 5})
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workload": {"agents": "steps=4", "documents": "10x20"}}, "documents are a part of"),
        (
            {"workload": {"agents": "steps=4", "begins_within": True}, "load": {"rate_per_s": [1]}},
            "begins_within is for concurrency",
        ),
    ],
)
def test_settings_without_effect_beside_agents_are_refused(given, said):
    with pytest.raises(InputError, match=said):
        parse_scenario(given)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_run_of_an_earlier_release_goes_on_with_its_scenario(path):
    stated = {"timeout_s": 60} if path.stem in TIMED else {}
    assert load_scenario(path).with_overrides(stated).hash()[:16] == HASHES[path.stem]


@pytest.mark.parametrize(("stated", "begin"), STATED_HASHES)
def test_a_run_of_an_earlier_release_goes_on_with_its_options(stated, begin):
    assert Scenario().with_overrides(stated).hash()[:16] == begin


def test_a_data_set_counts_with_its_bytes_wherever_it_lies(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    hashes = []
    for folder, content in (("a", '{"prompt": "x"}\n'), ("b", '{"prompt": "x"}\n')):
        (tmp_path / folder / "data.jsonl").write_text(content, encoding="utf-8")
        path = _file(tmp_path / folder, "workload: {dataset: data.jsonl}")
        hashes.append(load_scenario(path).hash())
    assert hashes[0] == hashes[1]
    (tmp_path / "b" / "data.jsonl").write_text('{"prompt": "y"}\n', encoding="utf-8")
    assert load_scenario(tmp_path / "b" / "scenario.yaml").hash() != hashes[0]


def test_levels_of_a_duration_have_no_number_of_requests():
    (level,) = levels_of(parse_scenario({"load": {"concurrency": 4, "duration_s": 5}}))
    assert (level.num_requests, level.duration_s) == (None, 5.0)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario_loads(path):
    assert levels_of(load_scenario(path))


def test_the_question_lengths_have_the_published_mean():
    """500 to 1000 tokens, 622 on average."""
    path = next(path for path in SHIPPED if path.stem == "questions-622-250")
    mix = yaml.safe_load(path.read_text(encoding="utf-8"))["workload"]["mix"]
    assert sum(kind["share"] for kind in mix) == pytest.approx(1.0)
    assert sum(kind["share"] * kind["input_tokens"] for kind in mix) == pytest.approx(622)
    assert {min(k["input_tokens"] for k in mix), max(k["input_tokens"] for k in mix)} == {500, 1000}


def test_one_mistake_is_one_line_and_several_are_a_list():
    with pytest.raises(InputError) as caught:
        parse_scenario({"workload": {"input_tokens": 0}})
    assert str(caught.value) == "scenario: workload.input_tokens: must be greater than 0, got 0"


@pytest.mark.parametrize("given", ["many", 0, True])
def test_connections_are_refused_in_one_sentence(given):
    with pytest.raises(InputError, match=r"reuse, per-request or a number") as caught:
        parse_scenario({"client": {"connections": given}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "workload",
    [
        {"input_tokens": 100},
        {"input_tokens": 99},
        {"input_lengths": "uniform(50,150)"},
        {"mix": [{"input_tokens": 500, "output_tokens": 1}, {"input_tokens": 9, "output_tokens": 1}]},
    ],
)
def test_a_shared_prefix_must_leave_a_prompt_something_of_its_own(workload):
    """Prompts would otherwise all be the same, and every one after the first a cache hit."""
    with pytest.raises(InputError, match="does not fit a prompt"):
        parse_scenario({"workload": {"shared_prefix": 100, **workload}})
    parse_scenario({"workload": {"shared_prefix": 4, **workload}})


@pytest.mark.parametrize("turns", ["x", 0])
def test_turns_that_are_none_are_called_turns(turns):
    with pytest.raises(InputError, match=r"turns '.*' are not understood"):
        parse_scenario({"workload": {"turns": turns}})


@pytest.mark.parametrize(
    ("source", "name", "has_effect"),
    [
        *((source, "input_tokens", False) for source in SOURCES),
        *((source, "output_tokens", source in ("dataset", "conversations")) for source in SOURCES),
    ],
)
def test_a_length_that_would_have_no_effect_is_refused(tmp_path, source, name, has_effect):
    """In one command or in one file; the default in a file is as good as unstated."""
    given = "" if source == "agents" else "/f"
    file = tmp_path / "s.yaml"
    fields = {f"workload.{name}": 100, f"workload.{source}": given}
    stated = f"workload: {{{source}: '{given}', {name}: %d}}"
    file.write_text(stated % 256)
    load_scenario(file)
    file.write_text(stated % 100)
    if has_effect:
        found = parse_scenario({}).with_overrides(fields)
        assert found == load_scenario(file)
        return
    with pytest.raises(InputError, match=f"^{name} would have no effect: lengths are those of {source}"):
        parse_scenario({}).with_overrides(fields)
    with pytest.raises(InputError, match=f"s.yaml: {name} would have no effect: lengths are those of {source}"):
        load_scenario(file)


def test_a_length_beside_a_files_conversations_keeps_them_or_is_refused(tmp_path):
    """output_tokens is the length of answers that the file does not state; a prompt has its own."""
    path = tmp_path / "chats.yaml"
    path.write_text("workload: {conversations: chats.jsonl}\n")
    scenario = load_scenario(path).with_overrides({"workload.output_tokens": 16})
    assert scenario.workload.conversations == str(tmp_path / "chats.jsonl")
    assert scenario.workload.output_tokens == 16
    with pytest.raises(InputError, match="input_tokens would have no effect"):
        scenario.with_overrides({"workload.input_tokens": 16})
