"""Run folders, recommendations and profiles with wrong values or torn bytes: one line each.

LMI_BENCH_FUZZ is the number of damaged files, here and in test_damaged_inputs (`make fuzz`:
100,000), LMI_BENCH_FUZZ_SEED where their seeds begin. A failure names the seed; the same seed
damages the same file in the same way.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import resources

import pytest

from lmi_bench.core.server_metrics import CloudWatch
from tests.fuzz.damage import SEED, call, damage, find

NUMBER = int(os.environ.get("LMI_BENCH_FUZZ", "2000")) // 2
BATCHES = 6 if NUMBER <= 1000 else 50


SWEEP = (
    *("sweep", "sim:ml.g5.2xlarge", "--model", "qwen3-8b", "--isl", "64", "--osl", "8"),
    *("--concurrency", "1,2,4", "--requests-per-level", "8", "--slo", "ttft_p90<=1s"),
)


FOUND = ("slo.json", "cloudwatch.json")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with its SLOs, a recommendation and a profile, as the commands write them."""
    folder = tmp_path_factory.mktemp("whole")
    model, slo = SWEEP[2:4], SWEEP[-2:]
    call(*SWEEP, "--out", folder / "run")
    call(*SWEEP[:8], *SWEEP[-2:], "--search", "concurrency", "--out", folder / "searched")
    shutil.move(folder / "searched" / "slo.json", folder / "run")
    shutil.rmtree(folder / "searched")
    figures = CloudWatch.from_json({"level": 0, "attempt": 1, "invocations": 8.0})
    (folder / "run" / "cloudwatch.json").write_text(json.dumps([figures.to_json()]))
    load = ("--input-tokens", "256", "--output-tokens", "64", "--rate", "2")
    on = ("--instance", "ml.g5.xlarge,ml.g6.xlarge")
    call("recommend", *model, *load, *slo, *on, "--json", folder / "rec.json")
    profile = resources.files("lmi_bench.catalog").joinpath("data/profiles/vllm.json")
    (folder / "profile.json").write_text(profile.read_text("utf-8"))
    return folder


def one(base, folder, draw):
    """Damage a file and give it to a command that reads it."""
    run, rec, profile = (folder / each for each in ("run", "rec.json", "profile.json"))
    shutil.copytree(base, folder)
    of_runs = (
        (*SWEEP, "--out", run, "--resume"),
        ("report", run, "--repair", "-o", folder / "o.html"),
        ("report", run, "-o", folder / "o.html", "--markdown", folder / "o.md"),
        ("gate", run, "--slo", "ttft_p90<=1s"),
        ("gate", base / "run", "--baseline", run),
        ("compare", base / "run", run),
        ("compare", run, base / "run"),
        ("export", run, "--format", "llm-d", "-o", folder / "e"),
        ("export", run, "-o", folder / "e.csv"),
        ("calibrate", run, "--instance", "ml.g5.2xlarge", "-o", folder / "p.json"),
        ("recommend", run, "--rate", "1", "--instance", "ml.g5.2xlarge,ml.g6.xlarge"),
    )
    of_recommendations = (
        ("report", base / "run", "--recommendation", rec, "-o", folder / "o.html"),
        ("deploy", "write", rec, "--out", folder / "d"),
        ("plan-day", rec),
    )
    length = ("--concurrency", "4", "--input-tokens", "64", "--output-tokens", "8")
    machine = ("--model", "qwen3-8b", "--instance", "ml.g5.2xlarge")
    of_profiles = (("predict", *machine, *length, "--profile", profile),)
    names = ("knees.json", "levels.jsonl", "manifest.json", "requests.jsonl", *FOUND)
    file, commands = draw.choice(
        ((run / draw.choice(names), of_runs), (rec, of_recommendations), (profile, of_profiles))
    )
    damage(file, draw)
    command = draw.choice(commands)
    call(*command)
    return file.name, command[0]


@pytest.mark.filterwarnings("ignore:.*--repair:UserWarning")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_damaged_file_ends_in_one_line(base, tmp_path, batch):
    seeds = range(SEED + batch, SEED + NUMBER, BATCHES)
    assert find(seeds, tmp_path, lambda folder, draw: one(base, folder, draw)) == []


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("profile.json", ("block_size",), 0),
        ("profile.json", ("reserve_bytes_per_token",), 1e308),
        ("profile.json", ("up_to", "host_per_prompt_token_s"), 0),
        ("profile.json", ("parameters", "bandwidth_share"), 1e-320),
        ("rec.json", ("recommended", "capacity_rate_per_s"), [1]),
        ("rec.json", ("recommended", "slos", 0), None),
        ("rec.json", ("recommended", "cost", "machine_price_range_usd_per_hour", 0), "2026"),
        ("rec.json", ("recommended", "cost", "machine_price_range_usd_per_hour"), [1.0]),
        ("run/manifest.json", ("target", "scheduler", "client_share"), "\ud800"),
        ("run/manifest.json", ("commands", 0), True),
        ("run/levels.jsonl", ("requests",), 0),
        ("run/levels.jsonl", ("input_tokens",), 2**70),
        ("run/levels.jsonl", ("ttft_ms", "mean"), -1),
        ("run/levels.jsonl", ("throughput_tokens_per_s",), 0),
        ("run/levels.jsonl", ("ttft_ms", "mean"), 1e308),
        ("run/requests.jsonl", ("ended_s",), 1e308),
        ("run/knees.json", (0, "concurrency"), 7),
    ],
)
def test_a_value_that_once_broke_a_command_is_named_or_shown(base, tmp_path, file, place, value):
    folder = tmp_path / "damaged"
    shutil.copytree(base, folder)
    lines = (folder / file).read_text().splitlines() if file.endswith("l") else [None]
    lines[0] = json.loads(lines[0] or (folder / file).read_text())
    holder = lines[0]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    (folder / file).write_text("\n".join([json.dumps(lines[0]), *lines[1:]]) + "\n")
    run, rec, out = folder / "run", folder / "rec.json", folder / "o.html"
    if file == "profile.json":
        alike = ("--concurrency", "4", "--input-tokens", "64", "--output-tokens", "8")
        machine = ("--model", "qwen3-8b", "--instance", "ml.g5.2xlarge")
        call("predict", *machine, *alike, "--profile", folder / file)
    elif file == "rec.json":
        call("plan-day", rec)
        call("report", run, "--recommendation", rec, "-o", out)
    else:
        call("report", run, "-o", out)
        call(*SWEEP, "--out", run, "--resume")
        call("recommend", run, "--rate", "1", "--instance", "ml.g5.2xlarge")


@pytest.mark.parametrize(
    ("key", "value", "number"),
    [("token_times_s", [0.0] * 8, None), ("token_times_s", [1e6] * 8, None), ("sent_s", 1e6, -1)],
)
def test_a_run_whose_requests_take_no_time_is_compared(base, tmp_path, key, value, number):
    """All of them, or one that was sent after its tokens: a draw has no time to divide by."""
    folder = tmp_path / "damaged"
    shutil.copytree(base / "run", folder)
    requests = folder / "requests.jsonl"
    lines = [json.loads(line) for line in requests.read_text().splitlines()]
    for line in lines if number is None else [lines[number]]:
        line[key] = value
    requests.write_text("\n".join(map(json.dumps, lines)) + "\n")
    call("compare", folder, base / "run")
    call("gate", base / "run", "--baseline", folder)
