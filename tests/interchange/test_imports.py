"""Other tools' results: formulas mapped, units changed, gaps named.

The files in tests/data/imports are made by hand from the fields that each tool documents, with
numbers chosen so that what must come out can be worked out on paper; no tool wrote them but
aiperf_0_13.json, which is what AIPerf 0.13.0 wrote of a server with a TTFT of 200 ms and an ITL of
20 ms (fields that are not read left out, a warm-up's phase put in).

Those in tests/data/imports_real are what the tools wrote, less ids, prompts and fields that are not
read: two users, six answers of eight tokens, of benchmarks/support/truth_server.c with a TTFT of
200 ms and an ITL of 20 ms. Two are of `lmi-bench serve` instead: genai_bench_0_0_5.json, and
aiperf_0_13_sweep.json of `--concurrency 1,2`.
"""

from __future__ import annotations

import errno
import json
import tarfile
from pathlib import Path

import pytest

from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.core import run_store
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run
from lmi_bench.interchange.imports.read import read_results, write_imported

DATA = Path(__file__).parent.parent / "data" / "imports"
REAL = DATA.with_name("imports_real")
STATED = {
    "vllm.json": ("vllm", 8, None),
    "vllm_detailed.json": ("vllm", None, 2.0),
    "sglang.jsonl": ("sglang", 16, None),
    "aiperf.json": ("aiperf", 4, None),
    "genai_perf.json": ("genai-perf", 4, None),
    "guidellm.json": ("guidellm", 4, None),
    "genai_bench.json": ("genai-bench", 8, None),
    "llmperf_summary.json": ("llmperf", 10, None),
    "inference_perf_stage_0.json": ("inference-perf", None, 10.0),
    "inferencex_agg.json": ("inferencex", 64, None),
    "awscurl.json": ("awscurl", 10, None),
}


def line_of(name, load=None):
    (level,) = read_results(DATA / name, load).levels
    return level.level.to_json()


@pytest.mark.parametrize("name", STATED)
def test_the_tool_and_the_load_are_told_from_the_fields(name, tmp_path):
    copy = tmp_path / "result"  # no name to go by
    copy.write_bytes((DATA / name).read_bytes())
    found = read_results(copy)
    line = found.levels[0].level.to_json()
    assert (found.tool, line["concurrency"], line["rate_per_s"]) == STATED[name]
    assert line["imported_from"] == found.tool


def test_every_sample_becomes_a_run_that_can_be_read_back(tmp_path):
    of_requests = ("_requests.jsonl", "_responses.json", "_responses.jsonl", "_per_request.json")
    for path in sorted(DATA.iterdir()):
        folder = tmp_path / path.stem
        parts = [read_results(path, Load(2) if path.name.endswith(of_requests) else None)]
        assert write_imported(parts, folder, command=["lmi-bench", "import"]) == 1
        run = load_run(folder)
        assert run.manifest.imported_from == parts[0].tool
        assert run.levels[0].imported_from == parts[0].tool


def test_an_import_that_fails_leaves_no_half_run(tmp_path, monkeypatch):
    """A full disk: what is there would be read as a run of fewer levels."""
    found = read_results(DATA / "vllm_detailed.json")
    written = []

    def append(path, data):
        written.append(path.name)
        if len(written) == 6:  # two new files, then two for each level
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_store.durable, "append_and_sync", append)
    with pytest.raises(LmiBenchError, match=r"cannot write level 2 .* make room, import again"):
        write_imported([found, found], tmp_path / "run", command=[])
    assert not (tmp_path / "run").exists()


def test_vllm_keeps_its_names_because_its_formulas_are_ours():
    line = line_of("vllm.json")
    assert (line["requests"], line["errors"], line["wall_s"]) == (300, 1, 60.0)
    assert line["throughput_tokens_per_s"] == 498.33
    assert (line["ttft_ms"]["p50"], line["ttft_ms"]["p99"]) == (48.0, 80.0)
    assert line["tpot_ms"]["mean"] == 15.0
    assert line["itl_ms"]["p99"] == 40.0
    assert line["e2e_ms"]["mean"] is None
    assert line["e2e_ms"]["unsupported"]["mean"] == "not in the imported file"
    assert line["imported"]["request_goodput"] == 4.5  # the key with the colon


def test_a_quantile_that_the_requests_cannot_support_is_held_back_here_too():
    """p99 needs 299 requests; AIPerf writes one for 100."""
    line = line_of("aiperf.json")
    assert line["ttft_ms"]["p90"] == 50.0
    assert line["ttft_ms"]["p99"] is None
    assert line["ttft_ms"]["unsupported"]["p99"] == "needs 299 samples, has 100"


def test_vllm_details_become_requests_with_their_token_times():
    """Sent at 100.0: tokens at 0.2, 0.3, 0.4 s; sent at 100.5: 0.3, 0.4, 0.6, 0.7 s after."""
    (level,) = read_results(DATA / "vllm_detailed.json").levels
    first, second, failed = level.records
    assert first.token_times_s == pytest.approx((0.2, 0.3, 0.4))
    assert second.token_times_s == pytest.approx((0.8, 0.9, 1.1, 1.2))
    assert not failed.ok
    line = level.level.to_json()
    assert (line["requests"], line["errors"], line["output_tokens"]) == (3, 1, 7)
    assert line["ttft_ms"]["mean"] == pytest.approx(250)
    assert line["itl_ms"]["mean"] == pytest.approx((100 + 100 + 100 + 200 + 100) / 5)
    assert line["dispatch_delay_ms"]["mean"] is None


def test_sglang_zeros_are_missing_and_its_divided_gaps_are_no_itl():
    line = line_of("sglang.jsonl")
    assert line["ttft_ms"]["mean"] is None
    assert "where it measured nothing" in line["ttft_ms"]["unsupported"]["mean"]
    assert line["itl_ms"]["mean"] is None
    assert "accepted draft length 2" in line["itl_ms"]["unsupported"]["mean"]
    assert line["e2e_ms"]["p50"] == 2350.0
    assert line["tpot_ms"]["mean"] == 36.0


@pytest.mark.parametrize("name", ["aiperf.json", "genai_perf.json"])
def test_nvidias_inter_token_latency_is_a_tpot(name):
    line = line_of(name)
    assert line["tpot_ms"]["p50"] == 11.9
    assert line["itl_ms"]["mean"] is None
    assert line["e2e_ms"]["mean"] == 1600.0
    assert (line["input_tokens"], line["output_tokens"]) == (51200, 12800)


def test_the_file_of_a_newer_aiperf_is_told_from_vllms_and_its_load_found():
    """It has vLLM's keys too, with objects under them; eight users, 24 requests of 64 tokens."""
    imported = read_results(DATA / "aiperf_0_13.json")
    (level,) = imported.levels
    assert (imported.tool, imported.facts["model"]) == ("aiperf", "truth-model")
    assert (level.level.to_json()["concurrency"], level.level.to_json()["requests"]) == (8, 24)
    assert level.level.to_json()["ttft_ms"]["p50"] == pytest.approx(200, rel=0.05)
    assert level.level.to_json()["tpot_ms"]["p50"] == pytest.approx(20, rel=0.02)
    assert level.level.to_json()["output_tokens"] == 24 * 64


@pytest.mark.parametrize(
    ("name", "tool", "ttft_off", "itl"),
    [
        ("vllm_0_32.json", "vllm", 0.03, "itl_ms"),
        ("aiperf_0_13_requests.jsonl", "aiperf", 0.03, "itl_ms"),
        ("guidellm_0_8.json", "guidellm", 0.03, "tpot_ms"),  # states no gaps
        ("llmeter_0_2.jsonl", "llmeter", 0.2, "tpot_ms"),  # was itself late: 228 ms
    ],
)
def test_a_file_that_a_tool_wrote_says_what_was_true_of_the_server(name, tool, ttft_off, itl):
    imported = read_results(REAL / name, Load(concurrency=2))
    (level,) = imported.levels
    line = level.level.to_json()
    assert (imported.tool, line["concurrency"], line["requests"]) == (tool, 2, 6)
    assert (line["errors"], line["output_tokens"]) == (0, 6 * 8)
    assert line["ttft_ms"]["p50"] == pytest.approx(200, rel=ttft_off)
    assert line[itl]["p50"] == pytest.approx(20, rel=0.05)


def test_what_genai_bench_wrote_fits_together_by_our_formulas():
    """24 answers of 8 tokens: TPOT is (E2E - TTFT) / 7, throughput all tokens over the duration."""
    (level,) = read_results(REAL / "genai_bench_0_0_5.json").levels
    line = level.level.to_json()
    assert (line["concurrency"], line["requests"], line["output_tokens"]) == (2, 24, 192)
    decoding_ms = line["e2e_ms"]["mean"] - line["ttft_ms"]["mean"]
    assert line["tpot_ms"]["mean"] == pytest.approx(decoding_ms / 7, rel=0.02)
    assert line["throughput_tokens_per_s"] == pytest.approx(192 / line["wall_s"])


def test_a_sweep_that_aiperf_wrote_has_the_figures_of_its_single_exports():
    """TTFT 54.12 and 37.79 ms, 69.64 and 154.49 tok/s: profile_export_aiperf.json of each."""
    found = read_results(REAL / "aiperf_0_13_sweep.json")
    lines = [level.level.to_json() for level in found.levels]
    assert [line["concurrency"] for line in lines] == [1, 2]
    assert [round(line["ttft_ms"]["mean"], 2) for line in lines] == [54.12, 37.79]
    assert [round(line["throughput_tokens_per_s"], 2) for line in lines] == [69.64, 154.49]
    assert [line["output_tokens"] for line in lines] == [48, 48]
    assert lines[0]["ttft_ms"]["std"] is None  # the file's is that of the runs, not of requests


def test_aiperf_requests_leave_the_warm_up_out_and_count_failures():
    """Two answers with gaps of 10, 20 and 30, 10 ms after 50 ms, and one 503."""
    line = line_of("aiperf_requests.jsonl", Load(concurrency=2))
    assert (line["requests"], line["errors"]) == (3, 1)
    assert line["ttft_ms"]["mean"] == pytest.approx(50)
    assert line["itl_ms"]["mean"] == pytest.approx(17.5)
    assert line["tpot_ms"]["mean"] == pytest.approx(17.5)
    assert line["wall_s"] == pytest.approx(1.01)


def test_aiperf_requests_do_not_say_their_load():
    with pytest.raises(InputError, match="--concurrency"):
        read_results(DATA / "aiperf_requests.jsonl")


def test_guidellm_is_mapped_by_formula_and_not_by_name():
    """Its inter-token latency is TPOT, its time per output token E2E / n; E2E is in seconds."""
    line = line_of("guidellm.json")
    assert line["tpot_ms"]["p50"] == 18.25
    assert line["latency_ms_per_token"]["p50"] == 18.75
    assert line["itl_ms"]["mean"] is None
    assert line["e2e_ms"]["mean"] == 1200.0
    assert line["throughput_tokens_per_s"] == pytest.approx(220.5)  # of all, not of successful ones
    assert (line["requests"], line["errors"], line["errors_by_kind"]) == (102, 2, {"incomplete": 2})
    assert line["wall_s"] == 30.0


def test_llmperf_seconds_become_ms_and_its_itl_is_left_out():
    """60 requests at 120 a minute took 30 s."""
    line = line_of("llmperf_summary.json")
    assert line["wall_s"] == 30.0
    assert line["ttft_ms"]["p90"] == pytest.approx(240)
    assert line["e2e_ms"]["mean"] == pytest.approx(2000)
    assert line["tpot_ms"]["mean"] is None
    assert "contains the TTFT" in line["itl_ms"]["unsupported"]["p50"]
    assert (line["requests"], line["errors"]) == (63, 3)


def test_genai_bench_seconds_become_ms_and_its_scenario_the_workload():
    """Of 40 answers p90 stands and p95 does not: it needs 59."""
    found = read_results(DATA / "genai_bench.json")
    line = found.levels[0].level.to_json()
    assert (line["requests"], line["errors"], line["wall_s"]) == (42, 2, 20.0)
    assert (line["input_tokens"], line["output_tokens"]) == (4000, 2000)
    assert line["ttft_ms"]["p90"] == pytest.approx(250)
    assert line["tpot_ms"]["mean"] == pytest.approx(21)
    assert line["e2e_ms"]["p50"] == pytest.approx(1100)
    assert line["e2e_ms"]["unsupported"]["p95"] == "needs 59 samples, has 40"
    assert "not the gaps" in line["itl_ms"]["unsupported"]["mean"]
    assert line["imported"]["status_codes"] == {"503": 2}
    assert found.workload == {"input_tokens": 100, "output_tokens": 50}


def test_genai_bench_may_have_been_told_to_write_ms(tmp_path):
    content = json.loads((DATA / "genai_bench.json").read_text())
    path = tmp_path / "ms.json"
    path.write_text(json.dumps({**content, "_time_unit": "ms"}))
    line = read_results(path).levels[0].level.to_json()
    assert line["ttft_ms"]["p90"] == pytest.approx(0.25)
    path.write_text(json.dumps({**content, "_time_unit": "min"}))
    with pytest.raises(InputError, match="unit 'min'"):
        read_results(path)


def test_llmperf_requests_have_latencies_and_no_timeline():
    """TTFT 0.2 and 0.4 s, E2E 1 and 2 s, and one 429."""
    found = read_results(DATA / "llmperf_individual_responses.json", Load(concurrency=2))
    line = found.levels[0].level.to_json()
    assert (line["requests"], line["errors"], line["output_tokens"]) == (3, 1, 60)
    assert (line["ttft_ms"]["mean"], line["e2e_ms"]["mean"]) == pytest.approx((300, 1500))
    assert line["wall_s"] is line["throughput_tokens_per_s"] is None
    assert "no times of day" in found.notes[0]


def test_inference_perf_requests_become_ours_in_both_forms_of_their_info():
    """Sent at 500.0: tokens after 0.2, 0.3, 0.4 s; at 500.1: after 0.3 and 0.5 s; a 503."""
    (level,) = read_results(DATA / "inference_perf_per_request.json", Load(rate_per_s=10)).levels
    first, second, failed = level.records
    assert first.token_times_s == pytest.approx((0.2, 0.3, 0.4))
    assert second.token_times_s == pytest.approx((0.4, 0.6))
    assert (failed.ok, failed.error) == (False, "busy")
    assert level.level.to_json()["ttft_ms"]["mean"] == pytest.approx(250)
    assert level.level.to_json()["itl_ms"]["mean"] == pytest.approx((100 + 100 + 200) / 3)
    assert level.level.to_json()["wall_s"] == pytest.approx(0.6)


def test_inference_perf_seconds_become_ms():
    line = line_of("inference_perf_stage_0.json")
    assert line["tpot_ms"]["mean"] == pytest.approx(60)
    assert line["latency_ms_per_token"]["p90"] == pytest.approx(75)
    assert line["ttft_ms"]["p50"] == pytest.approx(100)
    assert line["input_tokens"] == 76544
    assert line["wall_s"] == 31.0


def test_inferencex_gives_throughput_by_gpu_and_seconds():
    found = read_results(DATA / "inferencex_agg.json")
    line = found.levels[0].level.to_json()
    assert line["throughput_tokens_per_s"] == 4 * 500
    assert line["total_throughput_tokens_per_s"] == 4 * 1000
    assert line["ttft_ms"]["p50"] == pytest.approx(190)
    assert found.facts["n_accelerators"] == 4
    assert found.workload == {"input_tokens": 1024, "output_tokens": 1024}


def test_inferencex_over_several_nodes_has_no_total(tmp_path):
    content = json.loads((DATA / "inferencex_agg.json").read_text())
    path = tmp_path / "agg.json"
    path.write_text(json.dumps({**content, "disagg": True}))
    found = read_results(path)
    assert found.levels[0].level.to_json()["throughput_tokens_per_s"] is None
    assert found.notes


def test_awscurls_first_byte_is_not_called_a_first_token():
    line = line_of("awscurl.json")
    assert line["ttft_ms"]["mean"] is None
    assert line["imported"]["time_to_first_byte_ms"] == 40.0
    assert line["e2e_ms"]["p90"] == 550.0
    assert line["output_tokens"] == 51200
    # Little's law: 20 req/s of 0.495 s keep 9.9 of the 10 clients busy
    assert line["mean_concurrency"] == pytest.approx(9.9)


def test_llmeter_requests_keep_first_and_last_token():
    """Five tokens from 0.1 to 0.5 and to 0.6 s: TPOT 0.1 and 0.125 s."""
    line = line_of("llmeter_responses.jsonl", Load(concurrency=1))
    assert line["tpot_ms"]["mean"] == pytest.approx(112.5)
    assert line["itl_ms"]["mean"] is None
    assert (line["requests"], line["errors"]) == (3, 1)


def test_a_load_that_is_given_wins_over_the_file():
    assert line_of("vllm.json", Load(concurrency=7))["concurrency"] == 7


def test_what_no_tool_writes_is_refused_with_its_fields(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"a": 1, "b": 2}')
    with pytest.raises(InputError, match=r"no known tool writes such fields \(a, b"):
        read_results(path)
    path.write_text("not json")
    with pytest.raises(InputError, match="neither JSON"):
        read_results(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="no JSON object"):
        read_results(path)


def test_a_broken_field_names_the_file(tmp_path):
    content = json.loads((DATA / "guidellm.json").read_text())
    content["benchmarks"][0]["metrics"]["request_latency"] = 5
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"broken\.json: a field is missing or has another form"):
        read_results(path)


def test_a_number_beyond_a_float_is_missing(tmp_path):
    content = json.loads((DATA / "vllm.json").read_text()) | {"mean_ttft_ms": 10**400}
    (tmp_path / "vast.json").write_text(json.dumps(content))
    line = read_results(tmp_path / "vast.json").levels[0].level.to_json()
    assert line["ttft_ms"]["unsupported"]["mean"] == "not in the imported file"


def test_several_files_make_several_levels_of_one_tool_only(tmp_path):
    vllm = read_results(DATA / "vllm.json")
    assert write_imported([vllm, vllm], tmp_path / "run", command=["x"]) == 2
    with pytest.raises(InputError, match="import those of each tool separately"):
        write_imported([vllm, read_results(DATA / "awscurl.json")], tmp_path / "both", command=["x"])


def packed(tmp_path, **members):
    """An archive as a benchmark job leaves it, of these files of the test data."""
    path = tmp_path / "output.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, source in members.items():
            archive.add(DATA / source, f"artifacts/{name}/profile_export_aiperf.json")
    return path


def test_the_archive_of_a_benchmark_job_has_aiperfs_levels(tmp_path):
    plain = read_results(DATA / "aiperf_0_13.json")
    both = read_results(packed(tmp_path, one="aiperf_0_13.json", two="aiperf_0_13.json"))
    assert both.tool == plain.tool
    assert both.levels == 2 * plain.levels


def test_an_archive_of_something_else_is_one_line(tmp_path):
    path = tmp_path / "output.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(DATA / "aiperf.json", "logs.json")
    with pytest.raises(InputError, match=r"holds no profile_export_aiperf.json"):
        read_results(path)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(__file__, "profile_export_aiperf.json")
    with pytest.raises(InputError, match=r"output\.tar\.gz"):
        read_results(path)


def test_an_archive_that_is_cut_off_or_not_there_is_one_line(tmp_path):
    path = packed(tmp_path, one="aiperf_0_13.json")
    whole = path.read_bytes()
    for size in (len(whole) * 3 // 4, len(whole) // 2, 30):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"output\.tar\.gz"):
            read_results(path)
    with pytest.raises(InputError, match=r"cannot read .*nothing\.json: No such file"):
        read_results(tmp_path / "nothing.json")


def test_files_of_the_same_load_stay_levels_of_their_own(tmp_path):
    """Summaries have no requests that could be pooled: each file is a level."""
    content = json.loads((DATA / "vllm.json").read_text())
    paths = []
    for at, speed in enumerate((100.0, 50.0, 10.0)):
        paths.append(tmp_path / f"{at}.json")
        paths[-1].write_text(json.dumps(content | {"output_throughput": speed}))
    run = tmp_path / "run"
    assert write_imported([*map(read_results, paths)], run, command=["x"]) == 3
    found = [line.throughput_tokens_per_s for line in pooled_run(load_run(run)).levels]
    assert found == [100.0, 50.0, 10.0]


def test_rows_of_several_machines_or_models_are_not_one_run(tmp_path):
    one = json.loads((DATA / "inferencex_agg.json").read_text())
    path = tmp_path / "agg.json"
    several = {
        "accelerator is b200 and h200": {"hw": "b200"},
        "is 4 and 8": {"tp": 8},
        "model is large and tiny": {"model": "large"},
    }
    for named, other in several.items():
        path.write_text(json.dumps([one, one | other]))
        with pytest.raises(InputError, match=named):
            read_results(path)
    path.write_text(json.dumps([one, one | {"conc": 8}]))
    assert len(read_results(path).levels) == 2


def test_inference_perfs_users_are_users(tmp_path):
    """It queues a stage of users at once, so its rate is the number of requests."""
    content = json.loads((DATA / "inference_perf_stage_0.json").read_text())
    content["load_summary"] |= {"concurrency": 16, "requested_rate": 400.0}
    path = tmp_path / "stage_0_lifecycle_metrics.json"
    path.write_text(json.dumps(content))
    (level,) = read_results(path).levels
    assert (level.level.load.concurrency, level.level.load.rate_per_s) == (16, None)


@pytest.mark.parametrize(("name", "key"), [("aiperf.json", "input_config"), ("awscurl.json", "p90TimeToFirstByte")])
def test_values_that_are_nested_too_deep_are_one_line(tmp_path, name, key):
    """Options that are looked for however deep, and a value that is kept as it is."""
    path, circle, deep = tmp_path / "result.json", tmp_path / "result.yaml", []
    for _ in range(600):
        deep = [deep]
    path.write_text(json.dumps(json.loads((DATA / name).read_text()) | {key: deep}))
    circle.write_text(f"{key}: &again [*again]\n")
    for each in (path, circle):
        with pytest.raises(InputError, match=f"{each}: its values are nested more than 64 deep"):
            read_results(each, Load(4))
