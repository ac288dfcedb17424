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
    ("deepseek-ai/DeepSeek-V4-Pro", "deepseek-v4-pro", "mxfp4-float8"),
    ("nvidia/Llama-3.1-70B-Instruct-NVFP4", "llama-3.1-70b", "nvfp4"),
    ("nvidia/DeepSeek-R1-FP4", "deepseek-v3", "nvfp4"),
    ("RedHatAI/Qwen3-32B-NVFP4A16", "qwen3-32b", "nvfp4"),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
    ("demo-15m", "demo-15m", None),
    ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "deepseek-v3", "nvfp4"),
    ("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek-v3", "float8"),
    ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2", "float8"),
    ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b", "int4"),
    ("Llama-3.1-8B-Instruct-Q4_K_M", "llama-3.1-8b", "int4"),
    ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b", None),
    ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.3", None),
    ("mistralai/Mistral-Large-Instruct-2411", "mistral-large-123b", None),
    ("microsoft/Phi-4-mini-instruct", "phi-4-mini", None),
    ("microsoft/phi-4", "phi-4", None),
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


def groups(*weights, **more):
    of_groups = {f"group_{i}": {"weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": of_groups, **more}


def quark(weight):
    everywhere = {"weight": weight, "input_tensors": {"dtype": "fp8_e4m3"}, "bias": None}
    return {"quant_method": "quark", "global_quant_config": everywhere}


def modelopt(algorithm, *layers):
    own = {f"model.layers.{i}": {"quant_algo": each} for i, each in enumerate(layers)}
    return {"quant_method": "modelopt", "quant_algo": algorithm, "quantized_layers": own}


INT4, FP8 = {"num_bits": 4, "type": "int", "group_size": 32}, {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
KIMI_IGNORES = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
STATED = [
    ({"quant_method": "awq", "bits": 4}, "int4"),
    ({"quant_method": "gptq", "bits": 8}, "int8"),
    ({"quant_method": "fp8"}, "float8"),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "float8"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "int4"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, "int8"),
    (modelopt("NVFP4"), "nvfp4"),
    (modelopt("FP8"), "float8"),
    (modelopt("FP8_PB_WO"), "float8"),
    (modelopt("MIXED_PRECISION", "FP8", "W4A16_NVFP4"), "nvfp4"),
    (modelopt("MIXED_PRECISION", "MXFP8", "FP8"), "float8"),
    (groups(INT4), "int4"),
    (groups(INT4, ignore=KIMI_IGNORES), "int4-experts"),
    (groups({**FP4, "group_size": 32}, ignore=KIMI_IGNORES), "mxfp4"),
    (groups(FP8, kv_cache_scheme=FP8), "float8"),
    (groups(FP8, FP4), "nvfp4"),
    (quark({"dtype": "fp8_e4m3"}), "float8"),
    (quark({"dtype": "fp4", "group_size": 32}), "mxfp4"),
    (quark([{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]), "int4"),
]


def folder_of(tmp_path, config, beside=None):
    folder = tmp_path / "Qwen3-32B-AWQ"  # the folder's name says nothing, its files do
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return str(folder)


@pytest.mark.parametrize(("stated", "dtype"), [*STATED, (None, "float16")])
def test_a_folder_says_it_in_its_config(tmp_path, stated, dtype):
    config = {"quantization_config": stated} if stated else {}
    assert planned_dtype(folder_of(tmp_path, config)) == dtype


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"expert_dtype": "fp4", "quantization_config": FP8_BLOCKS}, "mxfp4-float8"),
        ({"text_config": {}, "quantization_config": {**FP8_BLOCKS, "expert_dtype": "fp4"}}, "mxfp4-float8"),
        ({"text_config": {"expert_dtype": "fp4", "quantization_config": FP8_BLOCKS}}, "mxfp4-float8"),
        ({"expert_dtype": "fp8", "quantization_config": FP8_BLOCKS}, "float8"),
        ({"expert_dtype": None, "quantization_config": FP8_BLOCKS}, "float8"),
    ],
)
def test_deepseek_v4_says_the_format_of_its_experts_apart(tmp_path, config, dtype):
    """As vLLM's DeepseekV4FP8Config reads it, and as transformers writes it (both 2026)."""
    assert planned_dtype(folder_of(tmp_path, config)) == dtype


@pytest.mark.parametrize("stated", [{}, {"quant_method": "modelopt", "quant_algo": None}])
def test_a_folder_that_names_no_format_has_whole_weights(tmp_path, stated):
    """ModelOpt also writes `quantization` where the KV cache alone is narrow."""
    beside = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    folder = folder_of(tmp_path, {} if stated else {"quantization_config": stated}, beside)
    assert planned_dtype(folder) == "float16"


def test_a_wrapped_model_says_it_in_its_text_config(tmp_path):
    text = {"quantization_config": groups(INT4, ignore=KIMI_IGNORES)}
    assert planned_dtype(folder_of(tmp_path, {"text_config": text})) == "int4-experts"


@pytest.mark.parametrize(("algorithm", "dtype"), [("FP8", "float8"), ("NVFP4", "nvfp4")])
def test_a_folder_of_modelopt_says_it_beside_its_config(tmp_path, algorithm, dtype):
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    assert planned_dtype(folder_of(tmp_path, {}, beside)) == dtype


@pytest.mark.parametrize(
    "stated", [{"quant_method": "aqlm"}, quark({"dtype": "fp6_e2m3"}), modelopt("MIXED_PRECISION")]
)
def test_an_unknown_quantization_is_refused_unless_a_format_is_stated(tmp_path, stated):
    folder = folder_of(tmp_path, {"quantization_config": stated})
    with pytest.raises(InputError, match="--dtype") as caught:
        planned_dtype(folder)
    assert "\n" not in str(caught.value)
    assert planned_dtype(folder, "int4") == "int4"


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
