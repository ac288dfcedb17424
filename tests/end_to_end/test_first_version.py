"""Files as the first versions wrote them are read, reported, compared and resumed.

tests/data/first_version is what these commands left, each at the first commit that runs it:

    daaf9816  sweep --target engine --isl 16 --osl 4 --concurrency 1,2 --requests-per-level 4
                  --warmup-requests 0 --out measured
              sweep --target sim:ml.g5.2xlarge --model qwen3-8b --isl 64 --osl 8 --concurrency 1,2,4
                  --requests-per-level 6 --warmup-requests 1 --out simulated
              recommend --model qwen3-8b --isl 64 --osl 8 --rate 2 --slo 'ttft_p90<=1s'
                  --instance ml.g5.2xlarge --instance ml.g6.2xlarge --json recommendation.json
    8665ab83  calibrate simulated --out profile.json
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lmi_bench.core.run_store import load_run
from tests.end_to_end.commands import lmi_bench

FIRST = Path(__file__).parents[1] / "data" / "first_version"
MODEL = ("--model", "qwen3-8b")


def stopped(name, tmp_path):
    """A copy of a run as a kill in its last level leaves it, and the scenario that began it."""
    run = tmp_path / name
    shutil.copytree(FIRST / name, run)
    lines = (run / "levels.jsonl").read_bytes().splitlines(keepends=True)
    (run / "levels.jsonl").write_bytes(b"".join(lines[:-1]))
    (run / "knees.json").unlink()
    scenario = tmp_path / f"{name}.yaml"  # JSON is YAML
    manifest = json.loads((run / "manifest.json").read_text("utf-8"))
    scenario.write_text(json.dumps(manifest["scenario"]), "utf-8")
    return run, scenario


def test_runs_are_reported_and_compared(tmp_path):
    page = tmp_path / "report.html"
    lmi_bench("report", FIRST / "measured", FIRST / "simulated", "-o", page)
    assert "ml.g5.2xlarge" in page.read_text("utf-8")
    measured = FIRST / "measured"
    assert "no difference" in lmi_bench("compare", measured, measured).stdout


def test_a_measured_run_goes_on(tmp_path):
    run, scenario = stopped("measured", tmp_path)
    kept = (run / "levels.jsonl").read_bytes()
    lmi_bench("sweep", scenario, "--out", run, "--resume")
    assert (run / "levels.jsonl").read_bytes().startswith(kept)
    assert [(level.index, level.attempt) for level in load_run(run).levels] == [(0, 1), (1, 2)]


def test_a_simulated_run_does_not_go_on_by_another_profile(tmp_path):
    run, scenario = stopped("simulated", tmp_path)
    refused = lmi_bench("sweep", scenario, "--out", run, "--resume", expect=2)
    assert ' at profile: "TGI 1.x (2023)", now "vLLM' in refused.stderr


def test_a_profile_is_planned_with():
    load = ("--input-tokens", "64", "--output-tokens", "8", "--rate", "2", "--slo", "ttft_p90<=1s")
    profile = ("--profile", FIRST / "profile.json", "--instance", "ml.g5.2xlarge")
    assert "1 x ml.g5.2xlarge" in lmi_bench("recommend", *MODEL, *load, *profile).stdout
