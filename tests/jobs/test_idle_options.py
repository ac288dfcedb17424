"""An option that another one, or its absence, leaves without effect is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmi_bench.cli.main import app
from lmi_bench.core.errors import InputError

SWEEP = "sweep sim:ml.g5.2xlarge -m qwen3-8b --isl 32 --osl 4 --out run"
DAY = "plan-day --capacity 5 --start-up 460"
RUN = Path(__file__).parents[1] / "data" / "first_version" / "simulated"
IDLE = [
    ("validate table.csv --profile vllm-0.12 --seed 3", "--seed is of the split"),
    ("explain blended --price 1 --throughput 100 --itl 20", "--throughput stands for"),
    ("explain blended --price 1 --instance ml.g5.xlarge --throughput 100", "both state the price"),
    ("serve --djl-version 0.26.0 --port 0", "--djl-version is of a serving.properties"),
    ("generate --choices a --choices b --stop x --max-new-tokens 5", "leave out --stop, --max-new-tokens"),
    ("workload from log.jsonl -o w.yaml --speed 5", "--speed multiplies the rate"),
    (f"gate {RUN} --failures infinite --rules agentx", "--failures says how"),
    (f"{SWEEP} --concurrency 2 --requests-per-user 2 --duration 20", "--duration both end"),
    (f"{SWEEP} --concurrency 2 --arrivals gamma", "--arrivals is for arrivals at a rate"),
    (f"{SWEEP} --concurrency 2 --burstiness 0.3", "--burstiness is for arrivals at a rate"),
    (f"{SWEEP} --concurrency 2 --ramp 10", "--ramp is for arrivals at a rate"),
    (f"{SWEEP} --concurrency 2 --listen 10.0.0.9:7711", "--listen is for hosts that join"),
    (f"{SWEEP} --rate 2 --requests-per-user 3", "--requests-per-user is for users"),
    (f"{SWEEP} --rate 2 --burstiness 0.2 --arrivals constant", "is of gamma arrivals"),
    (
        "sweep sim:ml.g5.2xlarge -m qwen3-8b --trace t.jsonl --rate 2 --arrivals constant --out run",
        r"--arrivals .* \(a --trace has its own\)",
    ),
    (
        "sweep sim:ml.g5.2xlarge -m qwen3-8b --trace t.jsonl --rate 2 --speed 2 --out run",
        "--speed is for a --trace as recorded",
    ),
    ("sweep sim:ml.g5.2xlarge -m qwen3-8b --resume", "name its folder with --out"),
    (f"{SWEEP} --concurrency 2 --against sim:ml.g6.2xlarge --workers 4", "--workers is for an"),
    ("sweep --matrix matrix.yaml --resume", "name its folder with --out"),
    ("sweep --matrix matrix.yaml --name mine", "--name is for a single sweep"),
    ("sweep --matrix matrix.yaml --workers 3", "--workers is for an endpoint"),
    (f"{DAY} --peak 20 --router random", "--router is for a policy"),
    (f"{DAY} --load day.csv --least-share 0.1", "--least-share is for a shape"),
    ("report run --figure-format svg", "--figure-format is for pictures"),
    ("workload from log.jsonl -o w.yaml --hours 3", "--hours is for a Prometheus server"),
]
MATRIX = """
targets: [{name: a, target: "sim:ml.g5.2xlarge", model: qwen3-8b}]
payloads: [{name: short, workload: {input_tokens: 16, output_tokens: 4}}]
"""


@pytest.mark.parametrize(("line", "message"), IDLE)
def test_an_option_without_effect_is_refused(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    (tmp_path / "log.jsonl").write_text('{"prompt_tokens": 30, "completion_tokens": 6}\n')
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
    assert {path.name for path in tmp_path.iterdir()} == {"matrix.yaml", "log.jsonl"}
