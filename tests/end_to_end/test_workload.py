"""From a log to a scenario that both a sweep and a plan accept; several models in one plan."""

from __future__ import annotations

import json
import random

import pytest
import yaml

from lmi_bench.core.scenario import load_scenario
from tests.end_to_end.commands import Server, lmi_bench

MACHINE = ("--instance", "ml.g5.2xlarge")


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """Two hours at 1 req/s with bursts; answers a quarter of the prompts; one system prompt."""
    folder = tmp_path_factory.mktemp("workload")
    draw, at, rows = random.Random(2), 1_700_000_000.0, []
    for _ in range(3000):
        at += draw.gammavariate(0.4, 1 / 0.4)
        asked = draw.choice((80, 160, 320))
        system = {"role": "system", "content": "be brief " * 20}
        user = {"role": "user", "content": f"{draw.random()}"}
        usage = {"prompt_tokens": asked, "completion_tokens": asked // 4}
        rows.append({"created": at, "usage": usage, "messages": [system, user]})
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "chat.yaml"
    done = lmi_bench("workload", "from", log, "-o", out, "--model", "llama-2-7b")
    return out, done.stdout


def test_a_log_becomes_a_scenario_with_its_lengths_bursts_and_prefix(scenario):
    path, text = scenario
    found = load_scenario(path)
    kinds = {(kind.input_tokens, kind.output_tokens) for kind in found.workload.mix}
    assert (80, 20) in kinds
    assert (320, 80) in kinds
    assert found.load.arrivals == "gamma"
    assert found.load.burstiness == pytest.approx(0.4, rel=0.2)
    assert found.load.rate_per_s[0] >= 1.0
    assert found.workload.shared_prefix == pytest.approx(len("system: " + "be brief " * 20) / 4, abs=4)
    assert "not known: the daily curve: 2" in text
    assert "correlation +1.00" in text


def test_a_sweep_and_a_plan_accept_the_scenario(scenario, tmp_path):
    path, _ = scenario
    content = yaml.safe_load(path.read_text())
    content |= {"target": "sim:ml.g5.2xlarge"}
    content["load"]["requests_per_level"] = 60
    short = tmp_path / "short.yaml"
    short.write_text(yaml.safe_dump(content))
    lmi_bench("sweep", short, "--out", tmp_path / "run")
    rec = tmp_path / "rec.json"
    done = lmi_bench("recommend", "--workload", path, "--slo", "ttft_p90<=2s", *MACHINE, "--json", rec)
    assert "in bursts (gamma" in done.stdout
    answer = json.loads(rec.read_text())
    assert answer["rate_per_s"] == content["load"]["rate_per_s"][0]
    assert {kind["input_tokens"] for kind in answer["kinds"]} >= {80, 160, 320}
    replay = lmi_bench(
        "verify",
        rec,
        "--target",
        "sim:ml.g5.2xlarge",
        "--requests",
        "60",
        "--out",
        tmp_path / "verified",
        expect=(0, 99),
    )
    assert "figures inside their intervals" in replay.stdout


def test_a_servers_page_of_metrics_is_a_source(tmp_path):
    server = Server(*("--executor", "simulated", "--instance", "ml.g5.2xlarge", "--model", "llama-2-7b"))
    try:
        lmi_bench(
            *("sweep", server.url, "--model", "llama-2-7b", "--out", tmp_path / "run"),
            *("--input-tokens", "16", "--output-tokens", "4", "--concurrency", "2"),
        )
        out = tmp_path / "seen.yaml"
        done = lmi_bench("workload", "from", f"prometheus:{server.url}/metrics", "-o", out)
    finally:
        server.stop()
    assert "not known: rate and daily curve" in done.stdout
    assert load_scenario(out).workload.mix


def test_settings_compete_on_the_command_line(tmp_path):
    rec = tmp_path / "rec.json"
    done = lmi_bench(
        *("recommend", "--model", "llama-2-7b", "--input-tokens", "128", "--output-tokens", "16"),
        *("--rate", "2", "--slo", "itl_p90<=200ms", *MACHINE, "--dtype", "float16,int4"),
        *("--kv-dtype", "float16,float8", "--max-batch", "8,64", "--json", rec),
    )
    settings = [c["setting"] for c in json.loads(rec.read_text())["candidates"]]
    assert len(settings) == 8
    assert {each["dtype"] for each in settings} == {None, "int4"}
    assert "each layout has its best engine setting" in done.stdout


def test_models_of_a_portfolio_share_a_machine(tmp_path):
    path = tmp_path / "models.yaml"
    one = {"model": "llama-2-7b", "input_tokens": 128, "output_tokens": 16, "rate_per_s": 0.2}
    path.write_text(yaml.safe_dump({"models": [{**one, "name": name} for name in ("a", "b")]}))
    done = lmi_bench("recommend", "--portfolio", path, "--instance", "ml.g5.12xlarge", "--tp", "1")
    assert "a (TP 1), b (TP 1)" in done.stdout
    assert "1 x ml.g5.12xlarge" in done.stdout
    refused = lmi_bench("recommend", "--portfolio", path, "--rate", "3", expect=2)
    assert "its file states" in refused.stderr
