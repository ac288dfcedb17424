"""Tables of measured levels: both families of columns, empty fields, lines that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_bench.analysis.fit.measured_tables import read_table, requests_of_open_loop
from lmi_bench.core.errors import InputError

ENDPOINT = (
    "model,instance,tp,instance_count,input_tokens,output_tokens,concurrency,"
    "throughput_tokens_per_s,latency_ms_per_token,remark\n"
)
ENGINE = (
    "model,accelerator,n_accelerators,tp,dtype,input_tokens,output_tokens,concurrency_or_rate,"
    "throughput_tokens_per_s,ttft_ms,itl_ms,e2e_ms,engine,e2e_p99_ms\n"
)


def table(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return read_table(path)


def test_an_endpoint_s_line_has_three_requests_a_user_and_latencies_cut_to_whole_ms(tmp_path):
    (row,) = table(tmp_path, ENDPOINT + "Llama 2 7B,ml.g5.2xlarge,1,2,256,128,8,210,37,x\n")
    cell = row.cell
    assert (cell.setup.shape.name, cell.replicas, cell.num_requests) == ("llama-2-7b", 2, 24)
    assert cell.latency_p90_s_per_token == pytest.approx(0.037)
    assert cell.measured("latency_p90_s_per_token") == pytest.approx(0.0375)
    assert not cell.throughput_by_latency


def test_latencies_with_decimals_were_not_cut(tmp_path):
    text = "Llama 2 7B,ml.g5.2xlarge,1,1,256,128,8,210,{},\n"
    rows = table(tmp_path, ENDPOINT + text.format("37.4") + text.format("38"))
    assert rows[1].cell.measured("latency_p90_s_per_token") == pytest.approx(0.038)


def test_an_engine_s_line_names_its_accelerators_and_a_load_of_either_kind(tmp_path):
    """8 users * 128 tokens / 2.445 s = 418.8 tok/s: this throughput was taken from the latency."""
    rows = table(
        tmp_path,
        ENGINE
        + "Qwen/Qwen3-32B,H100-SXM,2,2,bf16,1024,128,c=8,418.82,154.25,18.037,2445.0,vllm 1,\n"
        + "meta-llama/Llama-3.1-8B,H100,1,1,,512,256,rate=2.5/s,600,40,8,2100,vLLM  1,\n",
    )
    users, rate = rows[0].cell, rows[1].cell
    assert users.throughput_by_latency
    assert users.setup.instance.link.kind == "nvlink"
    assert users.tpot_mean_s == pytest.approx(0.018037)
    assert (rate.rate_per_s, rate.concurrency, rate.setup.dtype) == (2.5, 0, "float16")
    assert rows[1].engine == rows[0].engine == "vllm 1"


def test_a_cache_may_have_a_format_of_its_own(tmp_path):
    head = ENGINE.replace("dtype,input", "dtype,kv_dtype,input")
    line = "Llama 3.1 8B,H100,1,1,fp8,{},512,256,c=4,600,40,8,,nim,\n"
    stated, silent = table(tmp_path, head + line.format("fp8") + line.format(""))
    assert (stated.cell.setup.dtype, stated.cell.setup.kv_dtype) == ("float8", "float8")
    assert silent.cell.setup.kv_dtype is None


def test_empty_fields_are_unknown_and_unreadable_lines_are_kept_with_their_reason(tmp_path):
    rows = table(
        tmp_path,
        ENDPOINT
        + "Llama 2 7B,ml.g5.2xlarge,1,,256,256,4,,,\n"
        + "NoSuchModel 3T,ml.g5.2xlarge,1,1,256,256,4,10,100,\n"
        + "Llama 2 7B,ml.g5.2xlarge,1,1,256,256,,10,100,\n",
    )
    assert rows[0].cell.throughput_tokens_per_s is None
    assert rows[0].cell.replicas == 1
    assert rows[1].cell is None
    assert "not in the catalog" in rows[1].problem
    assert "neither a concurrency nor a rate" in rows[2].problem


def test_a_line_that_ends_early_is_kept_with_its_reason(tmp_path):
    head = "concurrency,tp,input_tokens,output_tokens,instance,model\n"
    (row,) = table(tmp_path, head + "4,1,256,256,ml.g5.2xlarge\n")
    assert row.cell is None
    assert "model ''" in row.problem


def test_another_table_is_refused(tmp_path):
    with pytest.raises(InputError, match="no column input_tokens"):
        table(tmp_path, "model,a\nx,1\n")
    with pytest.raises(InputError, match="cannot read"):
        read_table(Path("no/such/table.csv"))


def test_the_end_of_a_level_tells_how_many_requests_it_had(tmp_path):
    """1,000 requests at 10/s and a last answer of 2 s: 1000 * 100 / 102 s = 980.4 tok/s."""
    rows = table(tmp_path, ENGINE + "Llama 3.1 8B,H100,1,1,,512,100,rate=10/s,980.4,40,8,2000,vllm,\n")
    assert requests_of_open_loop(rows) == 1000


@pytest.mark.parametrize(
    ("accelerator", "dtype", "expected"),
    [
        ("H200-SXM", "FP8", ("H200", "float8")),
        ("A100-SXM", "w4a16 AWQ", ("A100-80", "int4")),
        ("NVIDIA A10G 24GB", "", ("A10G", "float16")),
    ],
)
def test_form_factors_and_words_for_formats_are_understood(tmp_path, accelerator, dtype, expected):
    line = f"Llama 3.1 8B,{accelerator},1,1,{dtype},512,100,c=4,100,40,8,900,vllm,\n"
    (row,) = table(tmp_path, ENGINE + line)
    assert (row.cell.setup.instance.accelerator.name, row.cell.setup.dtype) == expected


@pytest.mark.parametrize(
    ("load", "users", "rate"),
    [
        ("c=8", 8, None),
        ("16", 16, None),
        ("rate=2.5/s", 0, 2.5),
        ("rate=10 req/s", 0, 10.0),
        ("3 rps", 0, 3.0),
        ("rate=inf", 500, None),
    ],
)
def test_a_load_is_understood_as_people_write_it(tmp_path, load, users, rate):
    line = f"llama-3.1-8b,H100,1,1,,512,256,{load},600,40,8,2100,vllm,\n"
    (row,) = table(tmp_path, ENGINE + line)
    assert (row.cell.concurrency, row.cell.rate_per_s) == (users, rate)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (",8,210", ",0.5,210", "concurrency is '0.5'"),
        (",8,210", ",many,210", "concurrency is 'many'"),
        (",1,2,256", ",8x,2,256", "tp is '8x'"),
        (",256,128", ",,128", "no input_tokens"),
    ],
)
def test_a_count_that_is_none_is_said_and_never_guessed(tmp_path, old, new, says):
    line = "Llama 2 7B,ml.g5.2xlarge,1,2,256,128,8,210,37,x\n".replace(old, new)
    (row,) = table(tmp_path, ENDPOINT + line)
    assert row.cell is None
    assert says in row.problem


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100 40GB", "A100-40"),
        ("A100-SXM4-80GB", "A100-80"),
        ("A100", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
    ],
)
def test_an_accelerator_is_found_by_vendor_form_and_memory(tmp_path, name, expected):
    line = f"llama-3.1-8b,{name},1,1,,512,256,c=1,100,40,8,2100,vllm,\n"
    (row,) = table(tmp_path, ENGINE + line)
    assert row.cell.setup.instance.accelerator.name == expected
