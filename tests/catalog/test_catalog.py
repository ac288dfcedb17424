"""The catalog: found by what people call things, sourced, dated, never guessed."""

from __future__ import annotations

import pytest

from lmi_bench.catalog.accelerators import all_accelerators, find_accelerator
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import all_model_entries, find_model, find_model_entry, model_note
from lmi_bench.catalog.published import jumpstart_cells
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.models.planning_config import planning_shape
from tests.models.public_configs import CONFIGS


@pytest.mark.parametrize(
    "name",
    [
        "llama-2-7b",
        "Llama 2 7B",
        "LLAMA-2-7B",
        "meta-llama/Llama-2-7b-hf",
        "meta-llama/Llama-2-7b-chat-hf",
        "Llama 2 7B Chat",
        "llama2-7b",
    ],
)
def test_every_spelling_of_a_model_finds_one_shape(name):
    assert find_model(name).name == "llama-2-7b"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Mistral 7B Instruct", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Falcon 180B", "falcon-180b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
    ],
)
def test_chat_and_instruct_variants_have_their_base_models_shape(name, expected):
    assert find_model(name).name == expected


@pytest.mark.parametrize(
    ("name", "tokens"),  # max_position_embeddings of each config.json
    [
        ("Qwen/Qwen2.5-72B", 131_072),
        ("Qwen/Qwen2.5-72B-Instruct", 32_768),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 32_768),
        ("Qwen/Qwen3-30B-A3B", 40_960),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 262_144),
        ("Qwen/Qwen3-4B-Thinking-2507-FP8", 262_144),
        ("moonshotai/Kimi-K2-Instruct-0905", 262_144),
        ("zai-org/GLM-4.6", 202_752),
        ("microsoft/phi-4", 16_384),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 262_144),
        ("moonshotai/Kimi-K2-Thinking", 262_144),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 10_485_760),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 1_048_576),
        ("MiniMaxAI/MiniMax-Text-01", 10_240_000),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 1_048_576),
        ("ai21labs/AI21-Jamba-1.5-Mini", 262_144),
        ("deepseek-ai/DeepSeek-V2-Lite", 163_840),
    ],
)
def test_a_variant_has_its_own_context(name, tokens):
    assert find_model(name).max_positions == tokens


def test_rows_from_a_public_config_have_its_context():
    named = {entry.shape.name: entry.shape for entry in all_model_entries()}
    for name, config in CONFIGS.items():
        if name in named and "public_configs" in named[name].source:
            assert named[name].max_positions == planning_shape(name, config).max_positions, name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "qwen3-235b-a22b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("qwen3-235b", "qwen3-235b-a22b"),
        ("glm-4.5-air-fp8", "glm-4.5-air"),
    ],
)
def test_dates_and_short_forms_find_the_only_model_that_they_can_mean(name, expected):
    assert find_model(name).name == expected


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-r1-0528-qwen3-8b", "llama-3.1"])
def test_a_form_of_several_models_is_not_guessed(name):
    with pytest.raises(InputError, match="nearest"):
        find_model(name)


def test_a_name_that_was_completed_is_said():
    assert model_note("qwen3-30b-a3b-2507") == "model qwen3-30b-a3b-2507 is read as qwen3-30b-a3b"
    assert model_note("Qwen/Qwen3-30B-A3B") is None


def test_every_name_and_id_of_the_catalog_finds_its_own_row():
    for entry in all_model_entries():
        assert find_model_entry(entry.shape.name) is entry
        if entry.hf_id:
            assert find_model_entry(entry.hf_id) is entry


def test_an_unknown_model_names_the_nearest_ones():
    with pytest.raises(InputError, match=r"llama-9-7b.*nearest: .*llama-2-7b"):
        find_model("llama-9-7b")


def test_an_unknown_instance_names_the_nearest_ones():
    with pytest.raises(InputError, match=r"nearest: .*ml\.g5\.2xlarge"):
        find_instance("g5.2xlrge")


def test_an_instance_is_found_with_and_without_its_prefix():
    assert find_instance("g5.2xlarge") is find_instance("ML.G5.2xlarge")


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA A10G 24GB", "A10G"), ("NVIDIA A100 80GB", "A100-80"), ("h100", "H100-SXM")]
)
def test_published_names_of_accelerators_are_known(name, expected):
    assert find_accelerator(name).name == expected


def test_every_row_has_a_source_and_every_price_a_region_a_date_and_a_source():
    for accelerator in all_accelerators():
        assert accelerator.source, accelerator.name
    for model in (entry.shape for entry in all_model_entries()):
        assert model.source, model.name
    for instance in all_instances():
        assert instance.source, instance.instance_type
        if instance.price_usd_per_hour is not None:
            assert instance.price_region, instance.instance_type
            assert instance.price_date, instance.instance_type
            assert instance.price_source, instance.instance_type


def test_an_empty_price_stays_unknown():
    """The table has no price for p5e; a neighbour's must not stand in for it."""
    unpriced = find_instance("ml.p5e.48xlarge")
    assert unpriced.price_usd_per_hour is None
    assert unpriced.price_provenance is None
    empty = [row for row in read_rows("instances.csv") if not row["sagemaker_usd_per_hour"]]
    assert len(empty) == sum(i.price_usd_per_hour is None for i in all_instances())
    assert len(empty) >= 10


@pytest.mark.parametrize(
    ("name", "devices", "mib", "host", "usd"),
    [
        ("g5g.xlarge", 1, 15_360, "arm64", 0.42),
        ("g5g.metal", 2, 15_360, "arm64", 2.744),
        ("g6f.large", 1, 2_861, "x86_64", 0.202),
        ("gr6f.4xlarge", 1, 11_444, "x86_64", 1.066),
    ],
)
def test_machines_of_ec2_alone_have_their_devices_and_prices(name, devices, mib, host, usd):
    machine = find_instance(name)
    device = machine.accelerator
    assert (machine.num_accelerators, device.memory_bytes, device.host) == (devices, mib * 2**20, host)
    assert (machine.ec2_price_usd_per_hour, machine.has_endpoints) == (usd, False)


def test_an_unknown_figure_of_a_device_stays_unknown():
    assert find_accelerator("RTX-PRO-4500-Server").bandwidth_bytes_per_s is None
    assert find_instance("g6f.xlarge").accelerator.bandwidth_bytes_per_s is None


@pytest.mark.parametrize(
    ("name", "kind", "bytes_per_s"),
    [("ml.g5.2xlarge", "none", None), ("ml.g5.48xlarge", "pcie", 32e9), ("ml.p4d.24xlarge", "nvlink", 300e9)],
)
def test_the_link_is_what_joins_the_devices_of_the_machine(name, kind, bytes_per_s):
    link = find_instance(name).link
    assert (link.kind, link.bytes_per_s) == (kind, bytes_per_s)


@pytest.mark.parametrize(("name", "mib"), [("A10G", 22888), ("T4", 15360)])
def test_the_memory_is_what_the_device_reports_and_not_the_marketed_size(name, mib):
    assert find_accelerator(name).memory_bytes == mib * 2**20


def test_the_bandwidth_is_that_of_the_server_edition():
    """512 bits at 25 Gbit/s; the Workstation Edition has 28: 1,792 GB/s."""
    rate = find_instance("ml.g7e.2xlarge").accelerator.bandwidth_bytes_per_s
    assert rate == pytest.approx(512 / 8 * 25e9, rel=0.003)


def test_operations_a_byte_are_those_of_the_row():
    for row in read_rows("accelerators.csv"):
        if row["ops_per_byte_fp16"]:
            ratio = float(row["fp16_dense_tflops"]) * 1e3 / float(row["bandwidth_gb_s"])
            assert ratio == pytest.approx(float(row["ops_per_byte_fp16"]), rel=1e-3)


def test_the_published_tables_ship_whole():
    cells = jumpstart_cells("concurrency")
    assert (len(cells), len(jumpstart_cells("min_latency", "max_throughput"))) == (132, 32 + 32)
    assert len({cell.model for cell in jumpstart_cells("min_latency", "max_throughput")}) == 15
    first = cells[0]
    assert (first.throughput_tokens_per_s, first.latency_s_per_token) == (30.0, 0.033)
    assert {cell.replicas for cell in cells} == {1, 2, 3}
    for cell in (*cells, *jumpstart_cells("min_latency", "max_throughput")):
        find_model(cell.model)
        find_instance(cell.instance_type)


def test_every_count_of_a_mixture_with_latent_attention_is_read():
    """DeepSeek-V3's config.json: 512 latent values and 64 rotary ones are cached for each token."""
    shape = find_model("deepseek-v3")
    assert (shape.experts, shape.experts_per_token, shape.shared_experts) == (256, 8, 1)
    assert (shape.expert_ffn_size, shape.latent_kv_dim) == (2048, 512 + 64)
    assert find_model("llama-2-7b").latent_kv_dim == find_model("llama-2-7b").experts == 0
