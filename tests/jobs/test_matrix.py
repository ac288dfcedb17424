"""A matrix of sweeps: cells from targets and payloads, resumed cell by cell, one report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lmi_bench.core.errors import InputError
from lmi_bench.jobs import matrix
from lmi_bench.jobs.matrix import read_matrix, run_matrix
from lmi_bench.jobs.settings.sweep import LimitSettings, RunSettings, SweepSettings, TargetSettings
from lmi_bench.jobs.sweep.run import sweep_scenario
from tests.jobs.hearing import Hearing

SIMULATED = {"target": "sim:ml.g5.2xlarge", "model": "llama-2-7b"}
SHORT = {"name": "short", "workload": {"input_tokens": 16, "output_tokens": 4}}
LONG = {"name": "long", "workload": {"input_tokens": 64, "output_tokens": 8}}
QUICK = {"load": {"concurrency": [1, 2], "requests_per_user": 3}}


def of(path: Path, out: Path, *, resume: bool = False) -> SweepSettings:
    return SweepSettings(target=TargetSettings(matrix=path), run=RunSettings(out=out, resume=resume))


def matrix_file(tmp_path: Path, targets: list, payloads: list, defaults: dict = QUICK) -> Path:
    path = tmp_path / "matrix.yaml"
    content = {"targets": targets, "payloads": payloads, "defaults": defaults}
    path.write_text(yaml.safe_dump(content))
    return path


def test_every_payload_meets_every_target(tmp_path):
    path = matrix_file(tmp_path, [{"name": "a", **SIMULATED}, "http://b:1/v1"], [SHORT, LONG])
    cells = read_matrix(path)
    assert [cell.title for cell in cells] == [
        "short on a",
        "long on a",
        "short on http://b:1/v1",
        "long on http://b:1/v1",
    ]
    assert [cell.folder for cell in cells][2:] == ["http-b-1-v1--short", "http-b-1-v1--long"]


def test_credentials_in_an_address_name_neither_folder_nor_cell(tmp_path):
    url = "http://me:hidden@b:1/v1?sig=alsohidden"
    (cell,) = read_matrix(matrix_file(tmp_path, [url], [SHORT]))
    assert "hidden" not in cell.folder + cell.title
    assert cell.scenario.target == url


def test_the_target_wins_over_the_payload_and_the_payload_over_the_defaults(tmp_path):
    target = {"name": "a", **SIMULATED, "load": {"warmup_requests": 3}}
    payload = {**SHORT, "load": {"concurrency": [8], "requests_per_user": 3, "warmup_requests": 2}}
    (cell,) = read_matrix(matrix_file(tmp_path, [target], [payload], {"seed": 7, **QUICK}))
    assert (cell.scenario.load.concurrency, cell.scenario.load.warmup_requests) == ((8,), 3)
    assert cell.scenario.seed == 7


def test_a_payload_may_be_a_scenario_file_beside_the_matrix(tmp_path):
    (tmp_path / "chat.yaml").write_text("workload: {input_tokens: 9}\nload: {concurrency: 5}\n")
    (cell,) = read_matrix(matrix_file(tmp_path, [{"name": "a", **SIMULATED}], ["chat.yaml"]))
    assert cell.payload == "chat"
    assert cell.scenario.workload.input_tokens == 9
    assert cell.scenario.load.concurrency == (5,)


@pytest.mark.parametrize(
    ("targets", "payloads", "said"),
    [
        ([], [SHORT], "targets"),
        ([{"name": "a"}], [SHORT], "`target`"),
        (["http://a"], [{"workload": {}}], "`name`"),
        (["http://a"], [SHORT, SHORT], "rename one"),
        (["http://a"], [{**SHORT, "workload": {"input_token": 3}}], "did you mean"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_said_before_anything_runs(tmp_path, targets, payloads, said):
    with pytest.raises(InputError, match=said):
        read_matrix(matrix_file(tmp_path, targets, payloads))


def states(folder: Path) -> dict[str, str]:
    cells = json.loads((folder / "matrix.json").read_text())["cells"]
    return {cell["run"]: cell["state"] for cell in cells}


def test_a_matrix_resumes_at_the_cell_that_was_cut_off(tmp_path):
    """Two cells are finished; one lost its end, as if killed. It alone runs again."""
    out = tmp_path / "out"
    path = matrix_file(tmp_path, [{"name": "a", **SIMULATED}], [SHORT, LONG])
    assert not run_matrix(of(path, out)).failed
    assert states(out) == {"a--short": "finished", "a--long": "finished"}
    whole = {name: (out / name / "levels.jsonl").read_bytes() for name in states(out)}
    (out / "a--long" / "knees.json").unlink()
    first_line = whole["a--long"].splitlines(keepends=True)[0]
    (out / "a--long" / "levels.jsonl").write_bytes(first_line)

    with pytest.raises(InputError, match="--resume"):
        run_matrix(of(path, out))
    heard = Hearing()
    run_matrix(of(path, out, resume=True), heard)
    assert "cell 1/2: short on a: finished already" in heard.notes
    assert any("1 level(s) are finished" in text for text in heard.notes)
    assert (out / "a--short" / "levels.jsonl").read_bytes() == whole["a--short"]
    again = (out / "a--long" / "levels.jsonl").read_bytes()
    assert again.startswith(first_line)
    assert len(again.splitlines()) == 2
    page = (out / "report.html").read_text()
    assert "short on a" in page
    assert "long on a" in page


def test_a_cell_that_cannot_run_leaves_the_others_alone(tmp_path):
    out = tmp_path / "out"
    path = matrix_file(tmp_path, ["http://127.0.0.1:9", {"name": "a", **SIMULATED}], [SHORT])
    heard = Hearing()
    outcome = run_matrix(of(path, out), heard)
    assert outcome.failed
    assert states(out) == {"http-127.0.0.1-9--short": "failed", "a--short": "finished"}
    assert outcome.cells[0].error.startswith("nothing answers at http://127.0.0.1:9")
    assert "is the server up?" in heard.warnings[0]


def test_a_cell_that_was_damaged_leaves_the_others_alone(tmp_path):
    out = tmp_path / "out"
    path = matrix_file(tmp_path, [{"name": "a", **SIMULATED}], [SHORT, LONG])
    run_matrix(of(path, out))
    (out / "a--short" / "manifest.json").write_text('{"torn')
    (out / "a--long" / "knees.json").unlink()
    outcome = run_matrix(of(path, out, resume=True))
    assert outcome.failed
    assert states(out) == {"a--short": "failed", "a--long": "finished"}
    assert "manifest.json" in outcome.cells[0].error


def test_a_resumed_matrix_misses_the_slo_that_its_finished_cell_missed(tmp_path):
    out, defaults = tmp_path / "out", {**QUICK, "slo": ["ttft_p50<=1ms"]}
    path = matrix_file(tmp_path, [{"name": "a", **SIMULATED}], [SHORT], defaults)
    assert run_matrix(of(path, out)).slo_outcome == "missed"
    heard = Hearing()
    assert run_matrix(of(path, out, resume=True), heard).slo_outcome == "missed"
    assert heard.notes == ["cell 1/1: short on a: finished already"]


@pytest.mark.parametrize("cut_off", [False, True])
def test_the_money_is_that_of_all_cells_together(tmp_path, monkeypatch, cut_off):
    """At 1e9 USD an hour the first cell's virtual seconds use the limit up, if it ends or not."""

    def sweep(*args, out, **options):
        result = sweep_scenario(*args, out=out, **options)
        (out / "knees.json").unlink()
        return result

    if cut_off:
        monkeypatch.setattr(matrix, "sweep_scenario", sweep)
    out = tmp_path / "out"
    target = {"name": "a", **SIMULATED, "price_per_hour": 1e9}
    path = matrix_file(tmp_path, [target], [SHORT, LONG], {"load": {"concurrency": [1], "requests_per_user": 3}})
    outcome = run_matrix(replace(of(path, out), limits=LimitSettings(max_spend=1e-9)))
    assert "is spent" in outcome.cells[1].error
    assert states(out)["a--long"] == "failed"


def test_a_matrix_sweeps_the_degrees_of_one_machine(tmp_path):
    """1, 2, 4 and 8 devices, each its own run; published: TP 4 beats 8 for one copy of 7B."""
    targets = [
        {"name": f"tp{n}", "target": "sim:ml.p4d.24xlarge", "model": "llama-2-7b", "engine": {"tensor_parallel": n}}
        for n in (1, 2, 4, 8)
    ]
    payload = {"name": "short", "workload": {"input_tokens": 64, "output_tokens": 8}}
    path = matrix_file(tmp_path, targets, [payload], {"load": {"concurrency": [16]}})
    found = {}
    for cell in read_matrix(path):
        found[cell.title] = cell.scenario.engine.tensor_parallel
    assert found == {f"short on tp{n}": n for n in (1, 2, 4, 8)}
    assert not run_matrix(of(path, tmp_path / "out")).failed
    runs = sorted((tmp_path / "out").glob("*/levels.jsonl"))
    assert len(runs) == 4
    assert all(json.loads(run.read_text())["throughput_tokens_per_s"] > 0 for run in runs)
