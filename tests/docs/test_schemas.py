"""The shipped JSON Schemas are what the program declares, and what it writes fits them."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml

from benchmarks.schemas import SCHEMAS, texts
from lmi_bench.analysis.model.profiles import PROFILE_SCHEMA
from lmi_bench.core.server_metrics import CloudWatch
from tests.end_to_end.commands import lmi_bench

ROOT = Path(__file__).parents[2]
MODEL = ("--model", "qwen3-8b")


def validator(name):
    file = resources.files("lmi_bench").joinpath(f"core/data/schemas/{name}.schema.json")
    schema = json.loads(file.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", texts(), ids=lambda path: path.name)
def test_a_shipped_schema_is_the_one_that_is_declared(path):
    assert path.read_text("utf-8") == texts()[path], "python benchmarks/schemas.py writes it anew"


@pytest.mark.parametrize("path", sorted((ROOT / "scenarios").glob("*.yaml")), ids=lambda p: p.name)
def test_an_example_fits_the_schema_of_scenarios(path):
    validator("scenario").validate(yaml.safe_load(path.read_text("utf-8")))


@pytest.mark.parametrize(
    "content",
    [
        {"load": {"concurrency": "auto"}, "timeout_s": "none", "slo": "ttft_p90<=1s"},
        {"load": {"concurrency": 4}, "workload": {"turns": 3, "think_s": 1.5}},
        {"load": {"rate_per_s": 2.5}, "client": {"connections": 8}},
    ],
)
def test_the_short_forms_of_a_scenario_fit(content):
    validator("scenario").validate(content)


@pytest.mark.parametrize(
    "content",
    [
        {"loda": {}},
        {"workload": {"input_tokens": 0}},
        {"protocol": "grpc"},
        {"engine": {"dtype": "float33"}},
        {"timeout_s": "soon"},
    ],
)
def test_an_editor_marks_what_a_sweep_refuses(content):
    assert not validator("scenario").is_valid(content)


def test_a_field_of_a_scenario_is_described_in_the_editor():
    fields = validator("scenario").schema["$defs"]["WorkloadSection"]["properties"]
    assert fields["input_tokens"]["description"] == "Prompt length in tokens."


def test_the_files_of_a_run_fit_their_schemas(tmp_path):
    load = ("--isl", "64", "--osl", "16", "--concurrency", "1,2", "--requests-per-level", "8")
    run, rec, profile = (tmp_path / name for name in ("run", "rec.json", "profile.json"))
    lmi_bench("sweep", "sim:ml.g5.2xlarge", *MODEL, *load, "--out", run)
    question = ("--input-tokens", "64", "--output-tokens", "16", "--rate", "2")
    slo = ("--slo", "ttft_p90<=1s", "--instance", "ml.g5.2xlarge,ml.g6.2xlarge")
    lmi_bench("recommend", *MODEL, *question, *slo, "--json", rec)
    lmi_bench("calibrate", run, "--instance", "ml.g5.2xlarge", "-o", profile)
    for name, path in (("manifest", run / "manifest.json"), ("recommendation", rec), ("profile", profile)):
        validator(name).validate(json.loads(path.read_text("utf-8")))
    for name in ("level", "request"):
        for line in (run / f"{name}s.jsonl").read_text("utf-8").splitlines():
            content = json.loads(line)
            validator(name).validate(content)
            unknown = set(content) - set(validator(name).schema["properties"])
            assert unknown == set()
            content["level"] = "first"
            assert not validator(name).is_valid(content)


@pytest.mark.parametrize("name", ["knees", "slo", "matrix"])
def test_the_files_of_whole_sweeps_fit_their_schemas(name):
    """Those that `tests/golden` holds the program to."""
    files = sorted((ROOT / "tests" / "golden" / "outputs").glob(f"**/{name}.json"))
    assert files
    for path in files:
        content = json.loads(path.read_text("utf-8"))
        validator(name).validate(content)
        assert not validator(name).is_valid([*content[1:], 1] if name == "knees" else [])


def test_what_cloudwatch_said_fits_its_schema():
    level = CloudWatch(0, 1, "2026-01-01T00:00:00+00:00", 2, 0, invocations=8.0)
    validator("cloudwatch").validate([level.to_json()])
    assert not validator("cloudwatch").is_valid([{**level.to_json(), "minutes": "two"}])


@pytest.mark.parametrize("run", ["measured", "simulated"])
def test_runs_of_the_first_version_fit_the_schemas(run):
    """What was added since is optional: a schema's version covers the files of all its time."""
    folder = ROOT / "tests" / "data" / "first_version" / run
    for name in ("manifest", "knees"):
        validator(name).validate(json.loads((folder / f"{name}.json").read_text("utf-8")))
    for name in ("level", "request"):
        for line in (folder / f"{name}s.jsonl").read_text("utf-8").splitlines():
            validator(name).validate(json.loads(line))


def test_a_schema_states_the_version_of_its_file():
    assert validator("profile").schema["$id"] == f"urn:lmi-bench:profile:{PROFILE_SCHEMA}"
    ids = {validator(name).schema["$id"] for name in SCHEMAS}
    assert len(ids) == len(SCHEMAS)


def test_every_schema_is_of_a_file_that_is_tested():
    of_a_run = {"manifest", "level", "request", "knees", "slo", "cloudwatch"}
    assert set(SCHEMAS) == of_a_run | {"scenario", "matrix", "recommendation", "profile"}
