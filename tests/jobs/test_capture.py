"""`calibrate --on`: six levels of a server whose true step times are known, measured and fitted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_bench.analysis.fit.fit import fit_of_profile
from lmi_bench.analysis.fit.uncertainty import Estimate, estimates
from lmi_bench.analysis.model.builtin_profiles import VLLM
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import EngineProfile, profile_from_json, profile_to_json
from lmi_bench.analysis.results import latency
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import load_scenario
from lmi_bench.core.steadiness import SpeedStep
from lmi_bench.jobs import capture as job
from lmi_bench.jobs.calibrate import Calibration
from lmi_bench.jobs.capture import capture, plan_cells, without_address
from lmi_bench.jobs.catalog import catalog_table
from lmi_bench.jobs.settings.plan import CalibrateSettings
from lmi_bench.jobs.settings.setup import CatalogSettings
from lmi_bench.jobs.sweep import levels
from lmi_bench.jobs.sweep.run import sweep_scenario
from lmi_bench.targets.profiles import find_profile
from tests.end_to_end.commands import Server
from tests.jobs.hearing import Hearing
from tests.loadgen.ask.test_discover import good_completions, playing, says

FIGURES = {"throughput_tokens_per_s": 1.0, "tpot_mean_s": 1e-3, "ttft_mean_s": 1e-3}
SLOWER = {"bandwidth_share": 0.85, "compute_share": 0.8, "host_per_sequence_s": 1.5}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Path:
    """A scenario whose target is a machine with other step times than any profile has."""
    folder = tmp_path_factory.mktemp("server")
    own = VLLM.parameters
    parameters = replace(own, **{name: by * getattr(own, name) for name, by in SLOWER.items()})
    truth = replace(VLLM, version="0.13.0", parameters=parameters, fitted_cells=())
    (folder / "truth.json").write_text(profile_to_json(truth), encoding="utf-8")
    path = folder / "server.yaml"
    path.write_text(
        f"target: sim:ml.p5.4xlarge\nmodel: llama-3.1-8b\nengine: {{profile: {folder / 'truth.json'}}}\n",
        encoding="utf-8",
    )
    return path


def settings(server: Path, folder: Path, **more: object) -> CalibrateSettings:
    return CalibrateSettings(on=str(server), run_dir=folder, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def captured(server, tmp_path_factory):
    return capture(settings(server, tmp_path_factory.mktemp("capture")))[1]


def levels_of(found: Calibration | None) -> list[dict[str, Any]]:
    """The measured levels as the profile has them."""
    assert found is not None
    return list(found.profile.capture["cells"])


def as_written(profile: EngineProfile) -> EngineProfile:
    return profile_from_json(profile_to_json(profile))


def predicted(profile: EngineProfile, cell: MeasuredLevel) -> dict[str, Estimate]:
    return dict(estimates(fit_of_profile(profile, [cell]), cell, list(FIGURES)))  # type: ignore[call-overload]


@pytest.mark.parametrize(("prompt", "output", "users"), [(900, 120, 10), (300, 200, 24), (700, 50, 3)])
def test_a_captured_profile_predicts_another_level_within_its_interval(
    captured, server, tmp_path, prompt, output, users
):
    """The level is measured on the server itself; the profile that ships is less sure of it."""
    scenario = load_scenario(server).with_overrides(
        {
            "workload.input_tokens": prompt,
            "workload.output_tokens": output,
            "load.concurrency": [users],
            "load.requests_per_user": 10,
        }
    )
    (line,) = sweep_scenario(scenario, out=tmp_path / "other").levels
    setup = captured.fit.cells[0].setup
    cell = MeasuredLevel(setup, prompt, output, Load(users), line.sent, start_left_out=True)
    measured = {
        "throughput_tokens_per_s": line.throughput_tokens_per_s,
        "tpot_mean_s": line.of("tpot").mean / 1e3,
        "ttft_mean_s": line.of("ttft").mean / 1e3,
    }
    found = predicted(as_written(captured.profile), cell)
    for name, value in measured.items():
        assert found[name].low < value < found[name].high, name
    shipped, own = predicted(VLLM, cell)["tpot_mean_s"], found["tpot_mean_s"]
    assert math.log(own.high / own.low) < 0.5 * math.log(shipped.high / shipped.low)
    assert own.value == pytest.approx(measured["tpot_mean_s"], rel=0.05)


def test_six_levels_differ_in_length_and_load_and_take_less_than_ten_minutes(captured):
    cells = [(row["input_tokens"], row["output_tokens"], row["users"]) for row in levels_of(captured)]
    assert len(set(cells)) == 6
    assert len({prompt for prompt, _, _ in cells}) > 1
    assert len({users for _, _, users in cells}) > 1
    assert sum(row["seconds"] for row in levels_of(captured)) < 600
    assert all(row["self_check"] == "ok" for row in levels_of(captured))


def test_a_profile_says_how_it_was_captured(captured):
    profile = as_written(captured.profile)
    about = profile.capture
    assert about["cells"] == levels_of(captured)
    named = ("model", "instance", "accelerator", "tensor_parallel")
    assert [about[name] for name in named] == ["llama-3.1-8b", "ml.p5.4xlarge", "H100-SXM", 1]
    assert "0.13.0" in about["engine"]
    assert len(profile.levels) == 6


def test_an_interrupted_capture_goes_on_with_the_level_it_was_in(server, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_CELLS", 3)

    class Impatient(Hearing):
        def progress(self, description, done, total):
            if len([text for text in self.steps if text.startswith("level 2 of 3")]):
                raise KeyboardInterrupt

    assert capture(settings(server, tmp_path / "run"), Impatient()) == (tmp_path / "run", None)
    folders = sorted((tmp_path / "run").glob("1-*"))
    assert len(folders) == 1
    before = [(folder / "levels.jsonl").read_bytes() for folder in folders]
    _, whole = capture(settings(server, tmp_path / "run"))
    assert [(folder / "levels.jsonl").read_bytes() for folder in folders] == before
    assert len(whole.profile.levels) == 3
    with pytest.raises(InputError, match=r"is of llama-3\.1-8b, "):
        capture(settings(server, tmp_path / "run", model="llama-2-7b"))


def test_a_level_that_would_exceed_ten_minutes_is_left_out(server, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_BUDGET_S", 30.0)
    heard = Hearing()
    _, found = capture(settings(server, tmp_path / "run"), heard)
    assert 0 < len(levels_of(found)) < 6
    assert sum(row["seconds"] for row in levels_of(found)) < 30
    assert any("left out" in text for text in heard.warnings)


def test_levels_stay_within_a_short_context(captured):
    setup = captured.fit.cells[0].setup
    cells = plan_cells(setup, VLLM, 512)
    assert len(cells) == 6
    assert max(cell.input_tokens + cell.output_tokens for cell in cells) <= 512


def test_a_model_that_does_not_fit_is_refused_before_anything_is_sent(tmp_path):
    asked = CalibrateSettings(on="sim:ml.g5.2xlarge", model="llama-2-70b", tensor_parallel=1, run_dir=tmp_path / "run")
    with pytest.raises(InputError, match="weights a device at TP 1 exceed"):
        capture(asked)
    assert not (tmp_path / "run").exists()


def test_a_model_that_the_catalog_does_not_have_needs_its_config_json(tmp_path):
    served = {"data": [{"id": "team/our-own-model", "owned_by": "vllm", "max_model_len": 4096}]}
    routes = {("GET", "/v1/models"): says(served), ("POST", "/v1/completions"): good_completions}
    with playing(routes) as (url, _), pytest.raises(InputError, match=r"config\.json") as refused:
        capture(CalibrateSettings(on=url, instance="ml.g5.2xlarge", run_dir=tmp_path / "run"))
    assert "serves team/our-own-model" in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"on": "http://host:8000"}, "add --instance"),
        ({"on": "sim:ml.g5.2xlarge", "sources": (Path("runs/a"),)}, "leave runs/a out"),
        ({"sources": (Path("runs/a"),), "keep": "mine"}, "--keep is of a capture: add --on"),
    ],
)
def test_what_a_capture_cannot_use_is_said_in_one_line(more, said):
    with pytest.raises(InputError, match=said):
        CalibrateSettings(**more)


def test_a_name_that_ships_cannot_be_kept(server, tmp_path):
    with pytest.raises(InputError, match="--keep vllm: use a name of your own"):
        capture(settings(server, tmp_path / "run", keep="vllm"))


def test_a_kept_profile_is_listed_and_found_by_its_name(captured, tmp_path, monkeypatch):
    monkeypatch.setenv("LMI_BENCH_DATA", str(tmp_path))
    (tmp_path / "profiles").mkdir()
    text = profile_to_json(captured.profile)
    (tmp_path / "profiles" / "mine.json").write_text(text, encoding="utf-8")
    rows, _ = catalog_table("profiles", CatalogSettings())
    (row,) = [row for row in rows if row["profile"] == "mine"]
    assert row["figures"] == 24
    assert find_profile("mine") == as_written(captured.profile)
    with pytest.raises(InputError, match="nor one of vllm"):
        find_profile("another")


def test_an_endpoint_is_captured_without_its_address_in_the_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_CELLS", 2)
    monkeypatch.setattr(job, "_LEAST_S", 1)
    machine = ("--executor", "simulated", "--instance", "ml.g5.2xlarge", "--model", "demo-15m")
    running = Server(*machine)
    try:
        asked = CalibrateSettings(on=running.url, instance="ml.g5.2xlarge", run_dir=tmp_path / "run", api_key="s" * 20)
        _, found = capture(asked)
    finally:
        running.stop()
    assert found is not None
    profile = profile_to_json(found.profile)
    assert "127.0.0.1" not in profile
    assert "s" * 20 not in profile
    assert found.profile.capture["endpoint"] == "http://<redacted>"
    loads = [(row["input_tokens"], row["output_tokens"], row["users"]) for row in levels_of(found)]
    assert len(set(loads)) == 2, "a level that was not steady has several attempts"


def test_a_level_that_was_not_steady_is_fitted_by_its_steady_attempts_each_once(server, tmp_path, monkeypatch):
    """The server warms up in the first attempt; then two agree."""
    steps = iter([SpeedStep(at_s=1.0, change=0.3)])
    monkeypatch.setattr(job, "_CELLS", 1)
    monkeypatch.setattr(latency, "speed_step", lambda *_, **__: next(steps, None))
    monkeypatch.setattr(levels, "SIMULATED_PREFIX", "none:")  # else simulated ones never repeat
    _, found = capture(settings(server, tmp_path / "run"))
    (folder,) = (tmp_path / "run").glob("1-*")
    assert len((folder / "levels.jsonl").read_bytes().splitlines()) == 3
    assert len(levels_of(found)) == 2
    assert len(found.profile.levels) == 2


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("https://me:pw@host:1/v1?api-key=SECRET123", "https://<redacted>/v1<redacted>"),
        ("http://host?code=SECRET123", "http://<redacted><redacted>"),
        ("sagemaker:mine", "sagemaker:<redacted>"),
        ("sim:ml.g5.xlarge", "sim:ml.g5.xlarge"),
    ],
)
def test_no_part_of_an_address_is_passed_on_in_a_profile(target, shown):
    assert without_address(target) == shown
