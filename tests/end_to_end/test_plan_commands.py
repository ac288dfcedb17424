"""predict, calibrate and validate from the command line, and profiles where they are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import lmi_bench

PUBLISHED = Path(__file__).parents[2] / "lmi_bench/catalog/data/published"


def lines_of(path: Path, count: int) -> str:
    return "\n".join(path.read_text(encoding="utf-8").splitlines()[: count + 1]) + "\n"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    table = folder / "few.csv"
    table.write_text(lines_of(PUBLISHED / "jumpstart_concurrency.csv", 12), encoding="utf-8")
    done = lmi_bench("calibrate", table, "--out", folder / "profile.json", "--next", "2")
    return folder / "profile.json", done.stdout


def test_calibrate_writes_a_profile_and_names_the_next_levels(profile):
    path, printed = profile
    document = json.loads(path.read_text(encoding="utf-8"))
    assert set(document["accelerators"]) == {"A10G"}
    assert "12 levels of llama-2-7b" in document["fitted_on"]
    assert "Measure next" in printed


def test_predict_answers_for_a_model_that_was_not_measured(profile, tmp_path):
    out = tmp_path / "prediction.json"
    done = lmi_bench(
        *("predict", "--model", "llama-2-13b", "--instance", "ml.g5.12xlarge", "--tp", "4"),
        *("--concurrency", "1,16", "--isl", "256", "--osl", "256"),
        *("--profile", profile[0], "--json", out),
    )
    assert "80 % intervals" in done.stdout
    one, many = json.loads(out.read_text(encoding="utf-8"))["predictions"]
    assert one["throughput_tokens_per_s"]["low"] < one["throughput_tokens_per_s"]["predicted"]
    assert one["throughput_tokens_per_s"]["predicted"] < many["throughput_tokens_per_s"]["predicted"]
    assert one["cause"]


def test_predict_withholds_latency_near_capacity_and_says_why():
    done = lmi_bench(
        *("predict", "-m", "llama-2-7b", "--instance", "ml.g5.2xlarge", "--rate", "0.2,50"),
        *("--isl", "256", "--osl", "256"),
    )
    assert "withheld" in done.stdout
    assert "of the predicted capacity" in done.stdout


def test_predict_needs_one_load():
    done = lmi_bench(
        *("predict", "-m", "llama-2-7b", "--instance", "ml.g5.2xlarge", "--isl", "9", "--osl", "9"), expect=2
    )
    assert "--concurrency or --rate" in done.stderr


def test_validate_calibrates_on_another_file_and_writes_one_object_a_line(profile, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(lines_of(PUBLISHED / "jumpstart_concurrency.csv", 20), encoding="utf-8")
    out = tmp_path / "judged.json"
    done = lmi_bench("validate", table, "--calibrate-on", profile[0].parent / "few.csv", "--json", out)
    judged = json.loads(out.read_text(encoding="utf-8"))
    assert [row["calibrated"] for row in judged] == [True] * 12 + [False] * 8
    assert "covered" in done.stdout


def test_a_profile_plans_a_recommendation_and_a_simulated_sweep(profile, tmp_path):
    answer = tmp_path / "answer.json"
    lmi_bench(
        *("recommend", "-m", "llama-2-7b", "--isl", "256", "--osl", "256", "--rate", "1"),
        *("--instance", "ml.g5.2xlarge", "--profile", profile[0], "--json", answer),
    )
    assert "few.csv" in answer.read_text(encoding="utf-8")
    run = tmp_path / "run"
    lmi_bench(
        *("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b"),
        *("--concurrency", "1,2", "--isl", "64", "--osl", "16", "--profile", profile[0]),
        *("--out", run),
    )
    facts = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["target"]
    assert "few.csv" in facts["profile_provenance"]


def test_summaries_of_other_tools_calibrate(tmp_path):
    vllm = tmp_path / "vllm.json"
    vllm.write_text(
        json.dumps(
            {
                "model_id": "meta-llama/Llama-3.1-8B-Instruct",
                "num_prompts": 80,
                "completed": 80,
                "max_concurrency": 8,
                "request_rate": "inf",
                "total_input_tokens": 80 * 512,
                "total_output_tokens": 80 * 128,
                "request_throughput": 7.4,
                "output_throughput": 950.0,
                "mean_ttft_ms": 60.0,
                "mean_tpot_ms": 8.0,
            }
        )
    )
    aiperf = tmp_path / "aiperf.json"
    aiperf.write_text(
        json.dumps(
            {
                "input_config": {
                    "endpoint": {"model_names": ["meta-llama/Llama-3.1-8B-Instruct"]},
                    "loadgen": {"concurrency": 1},
                },
                "request_count": {"avg": 10},
                "input_sequence_length": {"avg": 512.0},
                "output_sequence_length": {"avg": 128.0},
                "output_token_throughput": {"avg": 148.0},
                "time_to_first_token": {"avg": 35.0},
                "inter_token_latency": {"avg": 6.6},
                "request_latency": {"avg": 873.2, "unit": "ms"},
            }
        )
    )
    out = tmp_path / "profile.json"
    lmi_bench("calibrate", vllm, aiperf, "--instance", "ml.p5.4xlarge", "-o", out)
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["models"] == ["llama-3.1-8b"]
    done = lmi_bench("calibrate", vllm, "-o", out, expect=2)
    assert "add --instance" in done.stderr


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "model,input_tokens,output_tokens\n"])
def test_what_is_no_table_is_refused_in_one_line(tmp_path, text):
    table = tmp_path / "table.csv"
    table.write_text(text)
    done = lmi_bench("validate", table, expect=2)
    assert done.stderr.startswith("error:")


IMPORTS = Path(__file__).parents[1] / "data/imports"
COPY = ("predict", "-m", "llama-2-7b", "--instance", "ml.g5.2xlarge")


def predicted(tmp_path, *more, copy=COPY):
    """The first load of a prediction."""
    out = tmp_path / "prediction.json"
    lmi_bench(*copy, *more, "--json", out)
    return json.loads(out.read_text(encoding="utf-8"))["predictions"][0]


def test_narrow_weights_read_faster_and_a_narrow_cache_holds_more(tmp_path):
    load = ("--isl", "512", "--osl", "128", "--concurrency", "1")
    plain = predicted(tmp_path, *load)
    weights = predicted(tmp_path, *load, "--weight-dtype", "int4")
    cache = predicted(tmp_path, *load, "--kv-dtype", "float8")
    assert weights["tpot_ms"]["predicted"] < plain["tpot_ms"]["predicted"]
    assert cache["capacity_tokens_per_s"]["predicted"] > plain["capacity_tokens_per_s"]["predicted"]


def test_a_cached_prefix_shortens_the_first_token_and_not_the_later_ones(tmp_path):
    load = ("--isl", "1024", "--osl", "64", "--concurrency", "1")
    plain, half = (predicted(tmp_path, *load, "--prefix-hit", hit) for hit in ("0", "0.5"))
    assert half["ttft_ms"]["predicted"] < 0.7 * plain["ttft_ms"]["predicted"]
    assert half["tpot_ms"]["predicted"] == pytest.approx(plain["tpot_ms"]["predicted"], rel=0.01)


def test_guesses_that_hold_pay_and_their_chance_must_be_given(tmp_path):
    """0.8 with four guesses: (1 - 0.8**5) / 0.2 = 3.36 tokens a step (Leviathan et al. 2023)."""
    load = ("--isl", "256", "--osl", "128", "--concurrency", "1")
    plain = predicted(tmp_path, *load)
    done = lmi_bench(*COPY, *load, "--draft", "ngram", "--draft-acceptance", "0.8")
    assert "3.36 tokens a step" in done.stdout
    spoken = predicted(tmp_path, *load, "--draft", "ngram", "--draft-acceptance", "0.8")
    assert spoken["tpot_ms"]["predicted"] < plain["tpot_ms"]["predicted"] / 2
    refused = lmi_bench(*COPY, *load, "--draft", "ngram", expect=2)
    assert "--draft-acceptance" in refused.stderr


def test_a_mix_lies_between_its_kinds_and_a_trace_keeps_its_own_times(tmp_path):
    users = ("--concurrency", "4")
    short, mixed, long = (
        predicted(tmp_path, *users, "--mix", mix) for mix in ("128/64", "128/64:1,1024/64:1", "1024/64")
    )
    times = [each["ttft_ms"]["predicted"] for each in (short, mixed, long)]
    assert times == sorted(times)
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.68,374,44\n"
        "2023-11-16 18:15:50.95,396,109\n"
        "2023-11-16 18:15:51.12,879,55\n"
    )
    replayed = predicted(tmp_path, "--trace", trace)
    assert replayed["requests"] == 3
    assert replayed["ttft_p90_ms"] is None  # three requests support no 90th percentile


@pytest.mark.parametrize(("rate", "is_given"), [("1", True), ("2.5", False)])
def test_a_mix_of_one_kind_and_its_lengths_are_equally_sure(tmp_path, rate, is_given):
    """2.5 req/s are 129 % of what the copy carries: neither gives a latency."""
    asked = (("--isl", "256", "--osl", "256"), ("--mix", "256/256"))
    by_lengths, by_mix = (predicted(tmp_path, *each, "--rate", rate) for each in asked)
    assert by_mix["withheld"] == by_lengths["withheld"]
    for key in ("throughput_tokens_per_s", "latency_ms_per_token", "tpot_ms", "ttft_ms"):
        one, other = by_lengths[key], by_mix[key]
        assert (one is not None) == (other is not None) == (is_given or key.startswith("thr"))
        if one is not None:
            for end in ("low", "high"):
                assert other[end] / other["predicted"] == pytest.approx(one[end] / one["predicted"])


def test_the_router_that_looks_keeps_the_queues_shorter_than_chance(tmp_path):
    load = ("--isl", "512", "--osl", "64", "--replicas", "4", "--rate", "11")
    looks, draws = (predicted(tmp_path, *load, "--router", router) for router in ("least-outstanding", "random"))
    assert looks["ttft_ms"]["predicted"] < draws["ttft_ms"]["predicted"]


def test_pools_under_unequal_requests_are_simulated_and_agree_with_the_closed_form(tmp_path):
    """Equal requests, few at once: no prompt and no cache waits long (two links carry 0.48 req/s),
    so both ways give one prompt's time, the transfer, and decode steps of the batch that Little's
    law gives."""
    split = ("--rate", "0.02", "--disaggregate", "2:1", "--network-gbps", "1")
    lengths = ("--isl", "1000", "--osl", "100")
    equal = predicted(tmp_path, *split, *lengths)
    mixed = predicted(tmp_path, *split, "--mix", "1000/100")
    for key in ("tpot_ms", "ttft_ms"):
        assert mixed[key]["predicted"] == pytest.approx(equal[key]["predicted"], rel=0.12)
    # 1,000 tokens of 512 KiB in float16 take 4.2 s over 1 Gbit/s, 0.42 s over ten
    faster = (*split[:-1], "10")
    sooner = predicted(tmp_path, *faster, "--mix", "1000/100")
    moved_ms = 1000 * 2**19 * 8 / 1e6 * (1 / 1 - 1 / 10)
    saved_ms = mixed["ttft_ms"]["predicted"] - sooner["ttft_ms"]["predicted"]
    assert saved_ms == pytest.approx(moved_ms, rel=0.02)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--mix", "64/64", "--shared-prefix", "8", "--disaggregate", "1:1"), "add --no-prefix-cache"),
        (("--mix", "64/64", "--router", "random", "--disaggregate", "1:1"), "leave --router and --replicas out"),
        (("--isl", "64", "--osl", "64", "--shared-prefix", "64"), "must be shorter than the prompts"),
        (
            (
                *("--isl", "64", "--osl", "64", "--disaggregate", "1:1", "-m", "llama-3.1-70b"),
                *("--instance", "ml.p5.48xlarge", "--tp", "8", "--prefill-tp", "1"),
            ),
            "131.4 GiB of weights a device at TP 1 exceed the",  # of a prefill worker
        ),
        (("--isl", "64", "--osl", "64", "--kv-dtype", "fp3"), "'fp3' is not known"),
        (("--mix", "512-128"), "IN/OUT"),
        (("--isl", "64", "--osl", "64", "--think-time", "30"), "`recommend --users N"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(more, says):
    done = lmi_bench(*COPY, *more, "--concurrency", "2", expect=2)
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_files_of_other_tools_calibrate_or_say_how(tmp_path):
    """GenAI-Perf names four users in a place of its own; AIPerf's single requests name no load."""
    machine = ("-m", "qwen2.5-0.5b", "--instance", "ml.g6.xlarge")
    names = ("vllm.json", "aiperf.json", "genai_perf.json", "guidellm.json")
    out = tmp_path / "profile.json"
    lmi_bench("calibrate", *(IMPORTS / name for name in names), *machine, "-o", out)
    levels = json.loads(out.read_text(encoding="utf-8"))["levels"]
    assert [level["concurrency"] for level in levels] == [8, 4, 4, 4]
    assert [level["length_spread"] for level in levels] == [0.1] * 4
    done = lmi_bench("calibrate", IMPORTS / "aiperf_requests.jsonl", *machine, expect=2)
    assert "lmi-bench import" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_validate_without_a_table_recomputes_the_errors_of_the_shipped_profiles(tmp_path):
    """TGI's profile on its own 95 lines; on models that it has not seen, the other 37 of 132 loads,
    and 24 of 32 least latencies and highest throughputs."""
    out = tmp_path / "errors.json"
    done = lmi_bench("validate", "--json", out)
    assert "other models" in done.stdout
    errors = [each for each in json.loads(out.read_text(encoding="utf-8")) if each["profile"] == "tgi-2023"]
    own = next(each for each in errors if each["lines"] == 95)
    assert own["lines of"] == "fitted models"
    assert own["median"] <= 0.045
    assert {each["lines"] for each in errors if each["lines of"] == "other models"} == {37, 24}


def test_validate_without_a_table_takes_no_option_of_one():
    done = lmi_bench("validate", "--calibrate-cells", "8", expect=2)
    assert "name a table" in done.stderr


def test_calibrate_names_the_first_levels_of_a_machine_that_nobody_has_measured():
    done = lmi_bench(
        *("calibrate", "--next", "4", "-m", "llama-2-13b", "--instance", "ml.g5.12xlarge"), *("--dtype", "float16")
    )
    levels = [line for line in done.stdout.splitlines() if "llama-2-13b on ml.g5.12xlarge" in line]
    assert len(levels) == 4
    assert "nothing yet" in done.stdout


def test_calibrate_without_levels_says_what_it_needs():
    assert "--next" in lmi_bench("calibrate", expect=2).stderr
    nowhere = ("calibrate", "--next", "1", "-m", "llama-2-70b", "--instance", "ml.g5.2xlarge")
    assert "fits ml.g5.2xlarge at no" in lmi_bench(*nowhere, expect=2).stderr


def test_a_profile_is_not_carried_to_another_version_without_a_warning():
    asked = ("-m", "llama-3-8b", "--instance", "ml.p5.48xlarge", "--isl", "256", "--osl", "64")
    plan = ("predict", *asked, "--concurrency", "4", "--profile", "vllm-0.12", "--engine-version")
    assert "not for version 0.19" in lmi_bench(*plan, "0.19").stderr
    assert "not for version" not in lmi_bench(*plan, "0.12.0").stderr


def test_what_each_line_of_a_table_states_is_not_stated_for_all(tmp_path):
    path = tmp_path / "cells.csv"
    path.write_text("model,instance\n")
    for command in (("calibrate", path, "--tp", "4"), ("validate", path, "--instance", "local")):
        refused = lmi_bench(*command, expect=2)
        assert f"{command[2]}: each line of cells.csv states its own" in refused.stderr


def test_profiles_are_listed_and_shown_as_the_catalog_does(profile):
    for own, other in ((("list",), ()), (("show", "SGLang"), ("SGLang",))):
        assert lmi_bench("profiles", *own).stdout == lmi_bench("catalog", "profiles", *other).stdout
    shown = lmi_bench("profiles", "show", profile[0])
    assert "bandwidth_share" in shown.stdout
    refused = lmi_bench("profiles", "show", "nosuch", expect=2)
    assert "nosuch: no such file, nor one of vllm, " in refused.stderr


def test_what_is_not_known_of_a_model_is_said_once(tmp_path):
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
    config = {"model_type": "something_new", "vocab_size": 1000, "max_position_embeddings": 4096, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = ("recommend", "--model", tmp_path, "--input-tokens", "100", "--output-tokens", "10", "--rate", "1")
    for more in ((), ("--explain",)):
        done = lmi_bench(*asked, "--instance", "ml.g5.2xlarge", *more)
        assert (done.stdout + done.stderr).count("every interval is wider") == 1
