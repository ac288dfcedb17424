"""A quantized checkpoint is planned as what it is, whoever leaves `--dtype` out."""

from __future__ import annotations

import json

import pytest

from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, narrow_dtype, planned_dtype
from lmi_bench.analysis.model.memory import weight_bytes
from lmi_bench.catalog.models import find_model, model_note
from lmi_bench.catalog.tables import variant_words
from lmi_bench.core.errors import InputError

PUBLISHED = [
    ("Qwen/Qwen3-32B-AWQ", "qwen3-32b", "int4"),
    ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "llama-3.1-70b", "int4"),
    ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "qwen2.5-72b", "int8"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "int4"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b", "float8"),
    ("amd/Llama-3.1-70B-Instruct-FP8-KV", "llama-3.1-70b", "float8"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3", "float8"),
    ("gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
    ("nvidia/Llama-3.1-70B-Instruct-NVFP4", "llama-3.1-70b", "nvfp4"),
    ("nvidia/DeepSeek-R1-FP4", "deepseek-v3", "nvfp4"),
    ("RedHatAI/Qwen3-32B-NVFP4A16", "qwen3-32b", "nvfp4"),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
    ("demo-15m", "demo-15m", None),
]


@pytest.mark.parametrize(("name", "model", "dtype"), PUBLISHED)
def test_the_name_says_the_format_and_the_shape_is_that_of_the_base(name, model, dtype):
    assert find_model(name).name == model
    assert narrow_dtype(name) == dtype
    assert planned_dtype(name) == (dtype or "float16")


def test_gpt_oss_120b_fits_one_device_of_80_gib_as_it_is_published():
    """OpenAI's card: it runs on a single 80 GB GPU. In 16 bits it would take 234 GB."""
    shape = find_model("gpt-oss-120b")
    assert weight_bytes(shape, planned_dtype("gpt-oss-120b")) < 70e9
    assert weight_bytes(shape, "float16") > 230e9


def test_a_stated_format_wins_and_its_short_name_is_spelt_out():
    assert planned_dtype("Qwen/Qwen3-32B-AWQ", "bf16") == "bfloat16"
    assert dtype_note("Qwen/Qwen3-32B-AWQ", "bf16") is None
    assert "int4" in dtype_note("Qwen/Qwen3-32B-AWQ")
    assert dtype_note("qwen3-32b") is None
    with pytest.raises(InputError, match="fp17"):
        planned_dtype("qwen3-32b", "fp17")


GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8"}, "float8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "float8"),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, "int4"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "float8"),
        ({"quant_method": "something-new"}, None),
        (None, None),
    ],
)
def test_a_folder_says_it_in_its_config(tmp_path, stated, dtype):
    folder = tmp_path / "Qwen3-32B-AWQ"  # the folder's name says nothing, its file does
    folder.mkdir()
    config = {"quantization_config": stated} if stated else {}
    (folder / "config.json").write_text(json.dumps(config))
    assert narrow_dtype(str(folder)) == dtype


def test_words_that_tell_a_variant_from_its_base():
    assert variant_words("Llama-3.1-8B-Instruct") == {"instruct"}
    assert variant_words("meta-llama/Llama-2-7b-hf") == frozenset()
    assert variant_words("google/gemma-3-1b-it") == {"it"}


@pytest.mark.parametrize(
    ("name", "base", "dated"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b", True),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3", True),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b", False),
        ("google/gemma-2-9b-it", "gemma-2-9b", False),
    ],
)
def test_a_variant_and_a_dated_release_have_the_base_s_shape(name, base, dated):
    assert find_model(name).name == base
    assert (model_note(name) is not None) == dated
