"""Runs and recommendations to report on: a small closed loop with a known server, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.answer import Candidate, MemoryUse, Question, Recommendation
from lmi_bench.analysis.fleet.money import NO_SPARES, Purchase, fleet_cost
from lmi_bench.analysis.level.layouts import Layout, Rejection
from lmi_bench.analysis.model.engine_setting import AS_STATED
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import GeneratorReport
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.workload import LevelSpec


def closed_loop(concurrency, requests, *, slots=24, step_s=0.03, per_sequence_s=0.0006, tokens=48):
    """Records of users against a server that decodes up to `slots` sequences in lockstep.

    Prefill takes 20 ms a request and pauses decode; a step takes step_s + per_sequence_s * batch.
    """
    now, sent = 0.0, 0
    waiting: list[tuple[int, float]] = []
    running: dict[int, tuple[float, list[float]]] = {}
    done: list[RequestRecord] = []
    free = concurrency
    while len(done) < requests:
        while free and sent < requests:
            waiting.append((sent, now))
            sent, free = sent + 1, free - 1
        while waiting and len(running) < slots:
            index, sent_s = waiting.pop(0)
            now += 0.02
            running[index] = (sent_s, [])
        now += step_s + per_sequence_s * len(running)
        for index in list(running):
            sent_s, times = running[index]
            times.append(now)
            if len(times) == tokens:
                del running[index]
                free += 1
                done.append(RequestRecord(index, sent_s, Exchange(sent_s, tuple(times)), input_tokens=256))
    return tuple(sorted(done, key=lambda record: record.request_id))


def manifest(name="", model="llama-2-7b", target="http://127.0.0.1:8080", slo=()):
    content = {
        "schema_version": 1,
        "created_at": "2026-01-02T03:04:05+00:00",
        "scenario": {
            "name": name,
            "model": model,
            "target": target,
            "workload": {"input_tokens": 256, "output_tokens": 48, "mix": [], "dataset": None},
            "load": {"concurrency": [1, 2, 4], "requests_per_user": 3},
            "slo": list(slo),
        },
        "scenario_hash": "0123abcd" * 8,
        "target": {"kind": "simulated" if target.startswith("sim:") else "http", "url": target},
        "host": {"cpu": "Some CPU", "cpus": 8, "memory_bytes": 34359738368, "python": "3.11.9"},
        "versions": {"lmi-bench": "0.1.0", "numpy": "2.1.0"},
        "commands": [["lmi-bench", "sweep", "--out", "runs/a"]],
    }
    return Manifest.from_json(content)


def make_run(name="", *, loads=(1, 2, 4, 8, 16, 32, 64), path="runs/a", more=None, **server: Any) -> Run:
    """A sweep against the server of `closed_loop`; `more` are arguments of `manifest`."""
    levels, records = [], []
    for index, load in enumerate(loads):
        here = closed_loop(load, 3 * load, **server)
        check = GeneratorReport(dispatch_delay_p99_s=0.0004, loop_lag_p99_s=0.001, cpu_share=0.07, timestamps="kernel")
        spec = LevelSpec(index, Load(concurrency=load), num_requests=3 * load)
        levels.append(summarise_level(LevelRun(spec, 1, here, check=check)))
        records.append(here)
    return Run(Path(path), manifest(name, **(more or {})), levels, records, None)


def candidate(instance, machines, tp, price, out_price, throughput, **more):
    """A candidate as the file has it."""
    known = {
        "instance": instance,
        "instances": machines,
        "tensor_parallel": tp,
        "copies": 1,
        "accelerator": "A10G",
        "price_usd_per_hour": price,
        "usd_per_month": None if price is None else 730 * price,
        "usd_per_1m_output_tokens": out_price,
        "usd_per_1m_total_tokens": None if out_price is None else out_price / 2,
        "usd_per_1m_output_tokens_at_saturation": out_price,
        "usd_per_1m_total_tokens_at_saturation": out_price,
        "blended_3to1_as_published": out_price,
        "blended_reason": None,
        "figures": {
            "throughput_tokens_per_s": Estimate(throughput, 0.9 * throughput, 1.1 * throughput),
            "ttft_p90_ms": Estimate(420.0, 300.0, 610.0),
            "itl_p50_ms": Estimate(40.0, 36.0, 50.0),
            "latency_per_token_p90_ms": Estimate(1040.0, 1036.0, 1050.0),
            "capacity_rate_per_s": Estimate(12.0, 10.0, 14.0),
        },
        "withheld": {},
        "slos": (),
        "memory": MemoryUse(24.0, 12.0, 8.0, 4, 6, 8, 3.5),
        "cost": fleet_cost(
            Layout(find_instance("ml.g5.2xlarge"), 1),
            Purchase(),
            NO_SPARES,
            needed=1,
            machines=1,
            capacity_tokens_per_s=throughput,
        ),
        "attainment": None,
        "setting": AS_STATED,
        "limited_by": "SLO (bandwidth)",
        "basis": "closed form",
        "price_provenance": None,
        "profile_provenance": "tgi-2023",
    }
    return Candidate(**(known | more)).to_json()


@pytest.fixture
def recommendation():
    """A recommendation as `recommend --json` writes it."""
    return _plan()


@pytest.fixture(scope="session")
def plan():
    """`recommendation`, for tests that only read it."""
    return _plan()


def _plan():
    best = candidate("ml.g5.12xlarge", 2, 4, 14.18, 1.62, 2430.0)
    others = [
        candidate("ml.p4d.24xlarge", 1, 8, 25.25, 2.41, 2905.0),
        candidate("ml.trn1.32xlarge", 1, 8, None, None, 1500.0),
    ]
    question = Question(
        model="llama-2-7b",
        dtype="float16",
        input_tokens=256,
        output_tokens=256,
        kinds=(),
        burstiness=1.0,
        rate_per_s=8.0,
        users=None,
        think_time_s=None,
        load="8 req/s, Poisson",
        slos=("ttft_p90<=1s",),
        objective="cost",
        purchase="on demand",
        availability="none",
        profile="tgi-2023",
        calibrated=False,
        measured_loads=0,
    )
    out = (
        ("ml.g4dn.xlarge", "weights need 12.6 GiB, ml.g4dn.xlarge has 14.6 GiB less 20 %"),
        ("ml.g5.xlarge", "weights need 25.1 GiB, ml.g5.xlarge has 22.0 GiB less 20 %"),
        ("ml.c5.large", "no accelerator in the catalog"),
    )
    rejected = tuple(Rejection(name, 1, 1, reason) for name, reason in out)
    empty = Recommendation(question, None, None, (), rejected)
    return empty.to_json() | {"recommended": best, "candidates": [best, *others]}


@pytest.fixture(scope="session")
def sweep():
    return make_run("TGI on g5.2xlarge", more={"slo": ["ttft_p90<=1s", "latency_per_token_p99<=100ms"]})


@pytest.fixture(scope="session")
def faster_sweep():
    return make_run("vLLM", path="runs/b", slots=256, per_sequence_s=0.0001)


@pytest.fixture
def runs_of():
    """`make_run`, for tests that need a run of their own."""
    return make_run


@pytest.fixture
def level_statistics():
    """One metric of a level's line with round numbers and no p99."""
    return {
        "mean": 40.0,
        "p50": 39.0,
        "p90": 45.5,
        "p95": None,
        "p99": None,
        "min": 30.0,
        "max": 50.0,
        "std": 4.0,
        "n": 48,
        "unsupported": {"p95": "needs 59 samples, has 48", "p99": "needs 299 samples, has 48"},
    }


@pytest.fixture
def golden():
    """The text of a file that was written by hand and is compared whole."""
    folder = Path(__file__).parent.parent / "golden"
    return lambda name: (folder / name).read_text(encoding="utf-8")
