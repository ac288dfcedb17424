"""Time and size of one report over many runs, and the time until a browser has opened it.

    python -m benchmarks.report_size [--runs 20] [--requests 1000000] [--keep FOLDER]

Runs of seeded records are written by the product's own run store, outside the timing. Each run has
nine closed-loop levels from 1 to 256 users, with more requests at more users, and answers of 4 to
60 tokens, 32 on average; a level's time to first token and step time grow with its users.
`lmi-bench report` on all of them is timed as a process of its own. Opening is timed in Chromium
without a window, from the navigation until the page is complete and every chart within the first
1200 by 900 pixels is drawn; the others are drawn as they come near or when there is time, and the
time until the last one is printed too. So is that of a link to the last chart.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import numpy as np

from lmi_bench.analysis.results.knee import find_knees
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.run_store import RunStore
from lmi_bench.core.workload import LevelSpec

_driver = import_module("tests.report.browser")  # it drives Chromium without a package
USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
INPUT_TOKENS = 256
MAX_BUILD_S, MAX_MB, MAX_OPEN_S = 20.0, 6.0, 2.0
_CHARTS = (
    "document.readyState === 'complete' && [...document.querySelectorAll('.chart')]"
    ".filter((each) => {filter}).every((each) => each.querySelector('.main-svg'))"
)
SEEN = _CHARTS.format(
    filter="each.getBoundingClientRect().top < innerHeight && each.getBoundingClientRect().bottom > 0"
)
DRAWN = _CHARTS.format(filter="true")
LAST_CHART = "view-interactivity"


def level_records(rng: np.random.Generator, users: int, requests: int) -> list[RequestRecord]:
    """A closed loop of users whose answers are lognormally noisy; each sends again at once."""
    free_s = np.zeros(users)
    tokens = rng.integers(4, 61, requests)
    ttft_s = (0.05 + 0.002 * users) * rng.lognormal(0.0, 0.3, requests)
    step_s = (0.02 + 0.0002 * users) * rng.lognormal(0.0, 0.1, requests)
    failed = rng.random(requests) < 0.001
    records = []
    for number in range(requests):
        user = number % users
        sent_s = float(free_s[user])
        gaps_s = step_s[number] * rng.uniform(0.8, 1.2, int(tokens[number]))
        times_s = sent_s + ttft_s[number] + np.cumsum(gaps_s)
        exchange = Exchange(sent_s, tuple(times_s.tolist()), finish_reason="length")
        free_s[user] = times_s[-1]
        record = RequestRecord(number, sent_s, exchange, INPUT_TOKENS, int(tokens[number]))
        if failed[number]:
            cut = Exchange(sent_s, ended_s=sent_s + 1.0)
            record = RequestRecord(number, sent_s, cut, INPUT_TOKENS, status="server_error", error="HTTP 500")
        records.append(record)
    return records


def write_run(folder: Path, seed: int, requests: int) -> None:
    """A finished run folder, by the writers that a sweep uses."""
    rng = np.random.default_rng(seed)
    shares = np.sqrt(USERS) / np.sqrt(USERS).sum()
    counts = np.maximum(1, np.floor(shares * requests)).astype(int)
    counts[-1] += requests - counts.sum()
    scenario = {
        "name": f"made-up server {seed}",
        "model": "llama-2-7b",
        "target": "http://127.0.0.1:8080",
        "workload": {"input_tokens": INPUT_TOKENS, "output_tokens": 32},
        "load": {"concurrency": list(USERS)},
        "slo": ["ttft_p90<=500ms", "latency_per_token_p99<=100ms"],
    }
    manifest = {
        "schema_version": 1,
        "scenario": scenario,
        "scenario_hash": f"{seed:064d}",
        "target": {"kind": "http", "url": scenario["target"]},
    }
    with RunStore.create(folder, Manifest.from_json(manifest)) as store:
        for index, (users, count) in enumerate(zip(USERS, counts.tolist(), strict=True)):
            records = level_records(rng, users, count)
            spec = LevelSpec(index, Load(concurrency=users), num_requests=count)
            store.append_level(records, summarise_level(LevelRun(spec, 1, tuple(records))))
        store.write_knees(find_knees(store.levels))


def open_s(page: Path, folder: Path) -> dict[str, float]:
    """Seconds until a page is open: a page of one word (the cost of the driver), the report, the
    report with every chart drawn, and a link to its last chart.
    """
    browser = _driver.Browser(folder / "chromium")
    empty = folder / "empty.html"
    empty.write_text("<!DOCTYPE html><main id=main>page</main>", encoding="utf-8")
    link = f"{page.as_uri()}#{LAST_CHART}"
    times_s = {}
    try:
        for name, address in (("empty", empty.as_uri()), ("page", page.as_uri()), ("link", link)):
            start_s = time.perf_counter()
            browser.open(address)
            browser.until(SEEN, 60)
            times_s[name] = time.perf_counter() - start_s
            if name == "page":
                browser.until(DRAWN, 60)
                times_s["all"] = time.perf_counter() - start_s
    finally:
        browser.close()
    return times_s


def main() -> None:
    """Print a row a figure, each beside its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of all runs together")
    parser.add_argument("--keep", type=Path, help="folder of the runs and the page, reused")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        runs = [folder / f"run-{seed:02}" for seed in range(args.runs)]
        for seed, run in enumerate(runs):
            if not run.exists():
                write_run(run, seed, args.requests // args.runs)
        size_gb = sum((run / "requests.jsonl").stat().st_size for run in runs) / 1e9
        load = os.getloadavg()[0]
        page = folder / "report.html"
        command = [sys.executable, "-m", "lmi_bench", "report", *map(str, runs), "-o", str(page)]
        start_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        build_s = time.perf_counter() - start_s
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [("build", build_s, "s", MAX_BUILD_S), ("page", page.stat().st_size / 1e6, "MB", MAX_MB)]
        if _driver.found() is not None:
            opened_s = open_s(page, Path(temporary))
            rows.append(("open in Chromium", opened_s["page"], "s", MAX_OPEN_S))
            rows.append(("open a link to the last chart", opened_s["link"], "s", MAX_OPEN_S))
            print(
                f"an empty page opens in {opened_s['empty']:.2f} s; every chart of the report, "
                f"those out of sight included, is drawn after {opened_s['all']:.2f} s"
            )
        print(
            f"{args.runs} runs, {args.requests:,} requests, {size_gb:.2f} GB of requests.jsonl; "
            f"load average before {load:.1f}, {os.cpu_count()} cores; the report took "
            f"{usage.ru_utime + usage.ru_stime:.1f} CPU seconds, {usage.ru_maxrss / 1e6:.2f} GB\n"
        )
        print("| what | measured | limit | |")
        print("|---|---:|---:|---|")
        for name, value, unit, limit in rows:
            verdict = "within" if value <= limit else "MISSED"
            print(f"| {name} | {value:.2f} {unit} | {limit:g} {unit} | {verdict} |")


if __name__ == "__main__":
    main()
