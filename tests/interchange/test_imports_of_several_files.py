"""Tools that spread one result over files: whichever is named, those beside it are read as well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import botocore.session
import pytest
from botocore.validate import ParamValidator

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.read import read_results

DATA = Path(__file__).parent.parent / "data" / "imports"
REAL = DATA.with_name("imports_real")

EVALSCOPE = {
    "Test Duration (s)": 10.0,
    "Concurrency": 4,
    "Request Rate (req/s)": -1,
    "Total Requests": 62,
    "Success Requests": 60,
    "Failed Requests": 2,
    "Req Throughput (req/s)": 6.0,
    "Avg Latency (s)": 0.6,
    "Avg Input Tokens": 30.0,
    "Output Throughput (tok/s)": 120.0,
    "Total Throughput (tok/s)": 300.0,
    "TTFT (ms)": 100.0,
    "TPOT (ms)": 25.0,
    "ITL (ms)": 24.0,
    "Avg Output Tokens": 20.0,
}
EVALSCOPE_ROWS = [
    {"Percentiles": label, "TTFT (ms)": ttft, "TPOT (ms)": tpot, "ITL (ms)": itl, "Latency (s)": e2e}
    for label, ttft, tpot, itl, e2e in (
        ("50%", 90.0, 24.0, 23.0, 0.5),
        ("90%", 150.0, 30.0, 40.0, 0.8),
        ("99%", 200.0, 35.0, 60.0, 0.9),
    )
]


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("named", ["benchmark_summary.json", "benchmark_percentile.json"])
def test_evalscope_means_and_quantiles_are_joined(tmp_path, named):
    """60 answers bear a p90 and no p99; of gaps there may be more."""
    files = {"benchmark_summary.json": EVALSCOPE, "benchmark_percentile.json": EVALSCOPE_ROWS}
    found = read_results(write(tmp_path, files) / named)
    line = found.levels[0].level.to_json()
    assert (found.tool, line["concurrency"], line["rate_per_s"]) == ("evalscope", 4, None)
    assert (line["requests"], line["errors"], line["output_tokens"]) == (62, 2, 1200)
    assert (line["ttft_ms"]["mean"], line["ttft_ms"]["p90"]) == (100.0, 150.0)
    assert (line["e2e_ms"]["mean"], line["e2e_ms"]["p50"]) == pytest.approx((600, 500))
    assert (line["ttft_ms"]["p99"], line["itl_ms"]["p99"]) == (None, 60.0)
    assert line["throughput_tokens_per_s"] == 120.0


def test_what_evalscope_wrote_fits_together_by_our_formulas():
    """Six answers of 8 tokens that `lmi-bench serve` gave two users: TPOT is (E2E - TTFT) / 7."""
    found = read_results(REAL / "evalscope_1_14" / "benchmark_summary.json")
    line = found.levels[0].level.to_json()
    assert (line["concurrency"], line["requests"], line["output_tokens"]) == (2, 6, 48)
    decoding_ms = line["e2e_ms"]["mean"] - line["ttft_ms"]["mean"]
    assert line["tpot_ms"]["mean"] == pytest.approx(decoding_ms / 7, rel=0.01)
    assert line["throughput_tokens_per_s"] == pytest.approx(48 / line["wall_s"], rel=0.01)
    assert line["ttft_ms"]["min"] < line["ttft_ms"]["p50"] < line["ttft_ms"]["max"]


def test_answers_that_evalscope_did_not_stream_have_no_first_token(tmp_path):
    content = {**EVALSCOPE, "Stream Requests": 0, "Non-Stream Requests": 62}
    line = read_results(write(tmp_path, {"s.json": content}) / "s.json").levels[0].level.to_json()
    assert line["ttft_ms"]["unsupported"]["mean"] == "the answers were not streamed"
    assert line["e2e_ms"]["mean"] == pytest.approx(600)


def test_evalscopes_older_names_were_seconds(tmp_path):
    old = {
        "Time taken for tests (s)": 10.0,
        "Number of concurrency": 4,
        "Total requests": 60,
        "Succeed requests": 60,
        "Failed requests": 0,
        "Output token throughput (tok/s)": 120.0,
        "Request throughput (req/s)": 6.0,
        "Average latency (s)": 0.6,
        "Average time to first token (s)": 0.1,
        "Average time per output token (s)": 0.025,
        "Average output tokens per request": 20.0,
    }
    rows = [{"Percentiles": "90%", "TTFT (s)": 0.15, "ITL (s)": 0.04, "Latency (s)": 0.8}]
    files = {"benchmark_summary.json": old, "benchmark_percentile.json": rows}
    line = read_results(write(tmp_path, files) / "benchmark_summary.json").levels[0].level.to_json()
    assert (line["ttft_ms"]["mean"], line["tpot_ms"]["mean"]) == pytest.approx((100, 25))
    assert (line["ttft_ms"]["p90"], line["e2e_ms"]["p90"]) == pytest.approx((150, 800))
    assert (line["requests"], line["output_tokens"]) == (60, 1200)


def test_evalscopes_quantiles_alone_do_not_say_of_what_load(tmp_path):
    folder = write(tmp_path, {"benchmark_percentile.json": EVALSCOPE_ROWS})
    with pytest.raises(InputError, match=r"benchmark_summary\.json, which is not in its folder"):
        read_results(folder / "benchmark_percentile.json")


def test_evalscope_at_a_rate_is_an_open_loop(tmp_path):
    content = {**EVALSCOPE, "Request Rate (req/s)": 5.0}
    line = read_results(write(tmp_path, {"s.json": content}) / "s.json").levels[0].level.to_json()
    assert (line["concurrency"], line["rate_per_s"]) == (None, 5.0)
    assert line["ttft_ms"]["unsupported"]["p50"] == "not in the imported file"


def test_llmeter_requests_take_their_clients_from_the_summary_beside_them(tmp_path):
    shutil.copy(DATA / "llmeter_responses.jsonl", tmp_path / "responses.jsonl")
    summary = {"clients": 3, "total_requests": 3, "total_test_time": 1.2}
    line = read_results(write(tmp_path, {"summary.json": summary}) / "responses.jsonl")
    assert line.levels[0].level.to_json()["concurrency"] == 3
    with pytest.raises(InputError, match=r"import stats\.json or responses\.jsonl"):
        read_results(tmp_path / "summary.json")


def test_llmeters_statistics_are_a_level(tmp_path):
    """48 tokens of 6 answers in 1.2 s."""
    stats = {
        "clients": 2,
        "total_requests": 6,
        "total_test_time": 1.2,
        "model_id": "m",
        "failed_requests": 0,
        "total_input_tokens": 384,
        "total_output_tokens": 48,
        "time_to_first_token-average": 0.2,
        "time_to_first_token-p50": 0.19,
        "time_to_last_token-average": 0.36,
        "time_to_last_token-p50": 0.35,
        "time_per_output_token-average": 0.02,
        "time_per_output_token-p50": 0.021,
    }
    found = read_results(write(tmp_path, {"stats.json": stats}) / "stats.json")
    line = found.levels[0].level.to_json()
    assert (found.tool, line["concurrency"], found.facts) == ("llmeter", 2, {"model": "m"})
    assert line["throughput_tokens_per_s"] == pytest.approx(40)
    assert line["total_throughput_tokens_per_s"] == pytest.approx(360)
    assert line["request_throughput_per_s"] == pytest.approx(5)
    assert (line["ttft_ms"]["p50"], line["tpot_ms"]["mean"]) == pytest.approx((190, 20))


def test_aiperf_and_llmperf_requests_take_their_load_from_their_summaries(tmp_path):
    shutil.copy(DATA / "aiperf_requests.jsonl", tmp_path / "profile_export.jsonl")
    shutil.copy(DATA / "aiperf.json", tmp_path / "profile_export_aiperf.json")
    assert read_results(tmp_path / "profile_export.jsonl").levels[0].level.to_json()["concurrency"] == 4
    individual = tmp_path / "m_550_150_individual_responses.json"
    shutil.copy(DATA / "llmperf_individual_responses.json", individual)
    shutil.copy(DATA / "llmperf_summary.json", tmp_path / "m_550_150_summary.json")
    assert read_results(individual).levels[0].level.load.concurrency == 10
    given = read_results(individual, Load(concurrency=2)).levels[0].level.to_json()
    assert given["concurrency"] == 2


def test_a_sweep_of_aiperf_is_a_level_for_each_combination(tmp_path):
    def combination(users, ttft_ms):
        found = {
            "time_to_first_token_avg": {"mean": ttft_ms, "unit": "ms"},
            "time_to_first_token_p50": {"mean": ttft_ms - 1, "unit": "ms"},
            "inter_token_latency_avg": {"mean": 0.02, "unit": "s"},
            "request_latency_avg": {"mean": 500.0, "unit": "ms"},
            "request_count_avg": {"mean": 20, "unit": "requests"},
            "output_token_throughput_avg": {"mean": 100.0 * users, "unit": "tokens/sec"},
        }
        return {"parameters": {"phases.profiling.concurrency": users}, "metrics": found}

    content = {"per_combination_metrics": [combination(1, 50.0), combination(4, 80.0)]}
    found = read_results(write(tmp_path, {"sweep.json": content}) / "sweep.json")
    lines = [level.level.to_json() for level in found.levels]
    assert found.tool == lines[0]["imported_from"] == "aiperf"
    assert [line["concurrency"] for line in lines] == [1, 4]
    assert [line["throughput_tokens_per_s"] for line in lines] == [100.0, 400.0]
    assert [line["ttft_ms"]["p50"] for line in lines] == [49.0, 79.0]
    assert lines[0]["tpot_ms"]["mean"] == pytest.approx(20)
    with pytest.raises(InputError, match="states the load of each level"):
        read_results(tmp_path / "sweep.json", Load(concurrency=1))


def test_the_mean_of_aiperfs_runs_is_a_level(tmp_path):
    content = {
        "metadata": {
            "aggregation_type": "confidence",
            "variation_values": {"phases.profiling.request_rate": 5},
            "model": "m",
        },
        "metrics": {
            "time_to_first_token_avg": {"mean": 50.0, "unit": "ms"},
            "time_to_first_token_std": {"mean": 9.0, "unit": "ms"},
            "request_count_avg": {"mean": 40, "unit": "requests"},
        },
    }
    found = read_results(write(tmp_path, {"aggregate.json": content}) / "aggregate.json")
    line = found.levels[0].level.to_json()
    assert (line["rate_per_s"], line["requests"], found.facts) == (5.0, 40, {"model": "m"})
    assert (line["ttft_ms"]["mean"], line["ttft_ms"]["std"]) == (50.0, None)


def test_the_history_of_a_search_is_no_result(tmp_path):
    content = {"config": {}, "iterations": [], "boundary_summary": {}}
    folder = write(tmp_path, {"search_history.json": content})
    with pytest.raises(InputError, match=r"profile_export_aiperf\.json of each iteration"):
        read_results(folder / "search_history.json")


def test_a_recommendation_job_of_sagemaker_names_the_benchmark_jobs_that_measured_it(tmp_path):
    """Its description has no requests; the sample is one that botocore's service model allows."""
    arn = "arn:aws:sagemaker:us-east-1:111122223333:ai-benchmark-job/chat-layout-1"
    performance = [{"Metric": "ttft", "Stat": "p50", "Value": "212.4", "Unit": "ms"}]
    deployment = {"InstanceType": "ml.g6e.xlarge", "InstanceCount": 1, "CopyCountPerInstance": 1}
    recommendation = {
        "DeploymentConfiguration": deployment,
        "AIBenchmarkJobArn": arn,
        "ExpectedPerformance": performance,
    }
    content = {
        "AIRecommendationJobName": "chat-recommendation",
        "AIRecommendationJobStatus": "Completed",
        "Recommendations": [recommendation],
    }
    service = botocore.session.get_session().get_service_model("sagemaker")
    shape = service.operation_model("DescribeAIRecommendationJob").output_shape
    known = {key: shape.members[key] for key in content}
    for key, member in known.items():
        assert not ParamValidator().validate(content[key], member).has_errors()
    folder = write(tmp_path, {"job.json": content})
    with pytest.raises(InputError, match=r"ml.g6e.xlarge by chat-layout-1\): import the output"):
        read_results(folder / "job.json")
    folder = write(tmp_path, {"job.json": {**content, "Recommendations": 3}})
    with pytest.raises(InputError, match="another form than documented"):
        read_results(folder / "job.json")
