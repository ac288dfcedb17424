"""From a sweep to a recommendation to a page, as the quickstart does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import lmi_bench

CANDIDATE_KEYS = {
    "instance",
    "instances",
    "tensor_parallel",
    "replicas",
    "price_usd_per_hour",
    "usd_per_1m_output_tokens",
    "usd_per_1m_total_tokens",
    "blended_3to1_as_published",
}
LLAMA = ("--model", "llama-2-7b", "--input-tokens", "256", "--output-tokens", "256")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    lmi_bench(
        *("sweep", "--model", "demo-15m", "--threads", "1", "--out", folder),
        *("--input-tokens", "16", "--output-tokens", "16", "--concurrency", "1,2,4"),
    )
    return folder


def test_a_sweep_of_the_engine_recommends_this_machine_without_a_price(tmp_path, run):
    answer = tmp_path / "local.json"
    said = lmi_bench("recommend", run, "--json", answer)
    content = json.loads(answer.read_text())
    best = content["recommended"]
    assert best["instance"] == "local"
    assert best["price_usd_per_hour"] is None
    assert best["usd_per_1m_output_tokens"] is None
    assert "bundled engine" in said.stdout


def test_the_cache_that_the_server_stated_holds_beside_a_run_too(tmp_path, run):
    held = []
    for tokens in (128, 4096):
        answer = tmp_path / f"{tokens}.json"
        layout = ("--instance", "local", "--tp", "1", "--kv-tokens", str(tokens))
        lmi_bench("recommend", run, *layout, "--json", answer)
        held.append(json.loads(answer.read_text())["recommended"]["memory"]["sequences_expected"])
    assert held[0] < held[1]
    refused = lmi_bench("recommend", run, "--kv-tokens", "128", expect=2)
    assert "--kv-tokens is of one layout" in refused.stderr


def test_the_catalog_is_ranked_by_cost_with_reasons_and_intervals(tmp_path):
    answer = tmp_path / "gpu.json"
    said = lmi_bench("recommend", *LLAMA, "--rate", "2", "--slo", "latency_per_token_p90<=60ms", "--json", answer)
    content = json.loads(answer.read_text())
    best = content["recommended"]
    assert set(best) >= CANDIDATE_KEYS
    figure = best["throughput_tokens_per_s"]
    assert figure["low"] <= figure["predicted"] <= figure["high"]
    priced = [c for c in content["candidates"] if c["price_usd_per_hour"] is not None]
    assert best["price_usd_per_hour"] == min(c["price_usd_per_hour"] for c in priced)
    assert content["rejected"]
    assert all(each["reason"] for each in content["rejected"])
    assert "profile vLLM 0.12 to 0.19, fitted" in said.stdout


def test_an_slo_out_of_reach_names_the_nearest_and_exits_99(tmp_path):
    answer = tmp_path / "none.json"
    said = lmi_bench("recommend", *LLAMA, "--rate", "2", "--slo", "itl_p90<=1ms", "--json", answer, expect=99)
    content = json.loads(answer.read_text())
    assert content["recommended"] is None
    assert content["nearest"]["instance"] in said.stdout


def test_a_rate_and_users_at_once_are_refused():
    done = lmi_bench("recommend", *LLAMA, "--rate", "2", "--users", "5", expect=2)
    assert "--users" in done.stderr


def test_the_page_holds_all_of_it_and_nothing_is_fetched(tmp_path, run):
    answer, page = tmp_path / "local.json", tmp_path / "report.html"
    lmi_bench("recommend", run, "--json", answer)
    lmi_bench("report", run, "--recommendation", answer, "-o", page)
    html = page.read_text(encoding="utf-8")
    for part in ("Concurrent requests", "Definitions", "Environment", "local", "Latency against"):
        assert part in html
    assert 'src="http' not in html
    assert 'href="http' not in html.split("</head>")[0]


def test_a_report_of_no_run_is_refused(tmp_path):
    done = lmi_bench("report", tmp_path, "-o", tmp_path / "x.html", expect=2)
    assert "manifest.json" in done.stderr
    assert not (tmp_path / "x.html").exists()
