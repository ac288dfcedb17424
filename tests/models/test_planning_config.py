"""Sizes of public models for planning, against published totals and arithmetic by hand."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import replace

import pytest

from lmi_bench.analysis.model.memory import StreamedParams, kv_bytes_per_sequence, kv_bytes_per_token, limited_reads
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.models.hf_config import shape_from_hf_config, spec_from_hf_config
from lmi_bench.models.planning_config import planning_shape
from tests.models.public_configs import CONFIGS, MORE_CONFIGS, PUBLISHED
from tests.models.wrong_values import WRONG

ALL = CONFIGS | MORE_CONFIGS


def shape_of(name, **changed):
    return planning_shape(name, ALL[name] | changed)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_within_1_per_cent_of_the_published_total(name):
    """Active ones within 5 %: cards state whole numbers, with or without the input embedding."""
    shape, (total, active) = shape_of(name), PUBLISHED[name]
    assert shape.params_total / 1e9 == pytest.approx(total, rel=0.01)
    assert not shape.doubt
    if active is not None:
        embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
        counts = (shape.params_active, shape.params_active - embedding)
        assert min(abs(count / 1e9 / active - 1) for count in counts) < 0.05


BY_ENGINE = {
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "kimi-k2": "DeepseekV3ForCausalLM",
    "glm-4.5": "Glm4MoeForCausalLM",
    "glm-4.5-air": "Glm4MoeForCausalLM",
    "gpt-oss-120b": "GptOssForCausalLM",
    "gpt-oss-20b": "GptOssForCausalLM",
    "qwen3-coder-480b-a35b": "Qwen3MoeForCausalLM",
    "mistral-small-3.1-24b": "Mistral3ForConditionalGeneration",
    "phi-4": "Phi3ForCausalLM",
    "gemma-3-27b": "Gemma3ForConditionalGeneration",
    "gemma-3-4b": "Gemma3ForConditionalGeneration",
}


@pytest.mark.parametrize("name", BY_ENGINE)
def test_the_engines_reader_agrees_on_weights_and_cache(name):
    """Planning counts matrices alone; the engine's reader norms, biases and sinks as well."""
    config = CONFIGS[name] | {"architectures": [BY_ENGINE[name]]}
    spec, planned = spec_from_hf_config(name, config), shape_of(name)
    engine, both = spec.shape(name), planning_shape(name, config)
    text = planned.params_total - planned.encoder_params
    assert engine.params_total == pytest.approx(text, rel=0.004)
    assert engine.params_active == pytest.approx(planned.params_active, rel=0.004)
    assert kv_bytes_per_token(engine) == kv_bytes_per_token(planned)
    for field in ("growing_layers", "sliding_window", "num_kv_heads", "shared_experts"):
        assert getattr(engine, field) == getattr(planned, field)
    assert (both.encoder_params, both.mtp_params) == (planned.encoder_params, planned.mtp_params)
    assert both.params_total == pytest.approx(engine.params_total + planned.encoder_params, rel=0.004)


@pytest.mark.parametrize("name", ["phi-4", "qwen3.5-27b", "minimax-m2", "deepseek-v3"])
def test_the_blocks_of_fp8_weights_are_read(name):
    """Of models that the engine runs and of others, wrapped or not."""
    for stated, block in (({"weight_block_size": [128, 128]}, 128), ({}, 0)):
        config = CONFIGS[name] | {"quantization_config": {"quant_method": "fp8", **stated}}
        assert planning_shape(name, config).weight_block == block


def saved_again(name):
    """A config in the form in which transformers 5.23 saves it."""
    config = copy.deepcopy(CONFIGS[name])
    if name == "deepseek-v4-flash":
        rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
        kinds = {rate: kind for kind, rate in rates.items()} | {0: "sliding_attention"}
        types = [kinds[rate] for rate in config.pop("compress_ratios")[: config["num_hidden_layers"]]]
        mlps = ["hash_moe"] * 3 + ["moe"] * (len(types) - 3)
        return config | {"compress_rates": rates, "layer_types": types, "mlp_layer_types": mlps}
    text = config["text_config"]
    own = {"head_dim": text.pop("global_head_dim")}
    if kv_heads := text.pop("num_global_key_value_heads", None):
        own["num_key_value_heads"] = kv_heads
    usual = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(text["num_hidden_layers"])]
    types = text.setdefault("layer_types", usual)
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    text["per_layer_config"] = {f"{i:02}": own for i in full}
    return config


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "gemma-4-31b", "gemma-4-e2b"])
def test_a_model_that_transformers_saved_again_has_the_same_sizes(name):
    assert planning_shape(name, saved_again(name)) == shape_of(name)


def test_a_gate_of_the_output_that_qwen_3_5_does_not_state_is_counted():
    config = copy.deepcopy(CONFIGS["qwen3.5-27b"])
    del config["text_config"]["attn_output_gate"]
    assert planning_shape("qwen3.5-27b", config) == shape_of("qwen3.5-27b")


@pytest.mark.parametrize(
    ("changed", "width"),
    [
        ({}, 4608),  # two thirds of 6656, in steps of 256, where the file does not say so
        ({"block_ffn_dim_multiplier": 1.5}, 6656),
        ({"block_auto_adjust_ff_dim": False}, 6656),
        ({"intermediate_size": 1024}, 4608),  # block_ff_dim counts before it
    ],
)
def test_lfm2_s_mlp_has_the_width_that_the_model_builds(changed, width):
    assert shape_of("lfm2-350m", **changed).ffn_size == width


def test_mamba_2_has_a_step_for_each_head():
    """7,285,403,648 parameters in Mamba-Codestral's folder; vectors are not counted."""
    assert shape_of("mamba-codestral-7b").params_total == pytest.approx(7_285_403_648, rel=0.001)
    assert shape_of("mamba2-2.7b").params_total == pytest.approx(2_702_599_680, rel=0.001)


def test_latent_attention_caches_one_vector_a_token_and_layer():
    assert kv_bytes_per_token(shape_of("deepseek-v3")) == 61 * (512 + 64) * 2
    assert kv_bytes_per_token(shape_of("kimi-k2"), tensor_parallel=8) == 61 * 576 * 2


@pytest.mark.parametrize(
    ("name", "growing", "layer_bytes"),
    [
        ("mamba-codestral-7b", 0, 0),  # its heads are those of the state
        ("mamba2-2.7b", 0, 0),
        ("longcat-flash", 2 * 28, 576 * 2),  # two attentions in a layer
        ("step-3", 61, 2 * 256 * 2),  # one group of keys
        ("ring-flash-linear-2.0", 4, 2 * 4 * 128 * 2),  # one layer of 8 is not linear
        ("hunyuan-large", 32, 2 * 8 * 80 * 2),  # two layers share a cache
        ("llama-3.2-90b-vision", 80, 2 * 8 * 128 * 2),  # 20 layers read images alone
        ("lfm2-1.2b", 6, 2 * 8 * 64 * 2),
        ("gemma-3n-e4b", 4, 2 * 2 * 256 * 2),
    ],
)
def test_only_layers_with_a_cache_of_their_own_grow_with_the_context(name, growing, layer_bytes):
    shape = shape_of(name)
    assert shape.growing_layers == growing
    # beyond every window
    more = kv_bytes_per_sequence(shape, 9_000) - kv_bytes_per_sequence(shape, 8_000)
    assert more == growing * layer_bytes * 1000


def test_a_stated_length_of_the_model_counts_before_that_of_its_positions():
    """As in vLLM: Command R+ has 8,192 positions in its file and is served up to 131,072."""
    assert shape_of("command-r-plus").max_positions == 131_072


@pytest.mark.parametrize(
    "architecture",
    ["BertForMaskedLM", "XLMRobertaModel", "ModernBertForMaskedLM", "Qwen3ForSequenceClassification", "CLIPModel"],
)
def test_a_model_that_embeds_or_ranks_is_refused(architecture):
    config = ALL["qwen2.5-vl-7b"] | {"model_type": "qwen3", "architectures": [architecture]}
    with pytest.raises(InputError, match=f"'m' is a {architecture}, which generates no text"):
        planning_shape("m", config)


def test_a_hybrid_caches_its_full_layers_and_keeps_a_constant_state():
    """Nemotron 3 Nano: 6 layers of 2 KV heads; 23 of 64 * 64 * 128 states in 32 bits
    and convolutions of 4 taps, which keep 3 inputs."""
    shape = shape_of("nemotron-3-nano")
    state = 23 * (64 * 64 * 128 * 4 + (4096 + 2 * 8 * 128) * 3 * 2)
    assert kv_bytes_per_sequence(shape, 10_000) == 6 * 2 * 2 * 128 * 2 * 10_000 + state
    half = kv_bytes_per_sequence(shape, 10_000, tensor_parallel=2)
    assert half == 6 * 2 * 1 * 128 * 2 * 10_000 + state / 2
    assert shape.num_layers == 52
    assert shape.growing_layers == 6


def test_a_state_space_model_needs_no_more_memory_for_longer_requests():
    """Mamba 2.8B: 64 layers of 5,120 channels with 16 states in 32 bits, 3 inputs in 16."""
    shape = shape_of("mamba-2.8b")
    state = 64 * 5120 * (16 * 4 + 3 * 2)
    assert kv_bytes_per_sequence(shape, 100) == kv_bytes_per_sequence(shape, 100_000) == state


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_a_state_space_beside_attention_has_its_state_in_every_layer(dtype, width):
    """Falcon-H1 34B: 32 * 128 * 256 states, 3 inputs of 4096 + 2 * 2 * 256 channels, 72 layers."""
    shape = shape_of("falcon-h1-34b", mamba_ssm_dtype=dtype)
    assert shape.state_bytes == 72 * (32 * 128 * 256 * width + 3 * (4096 + 2 * 2 * 256) * 2)
    assert shape.growing_layers == 72


def test_the_catalog_s_states_are_those_of_the_configs():
    for name in ("jamba-1.5-mini", "granite-4.0-h-small", "kimi-linear-48b-a3b", "qwen3.5-27b"):
        assert find_model(name).state_bytes == shape_of(name).state_bytes


@pytest.mark.parametrize(
    ("name", "full", "window"),
    [
        ("gpt-oss-120b", 18, 128),
        ("llama-4-scout", 12, 8192),
        ("gemma-3-27b", 10, 1024),
        ("command-a", 16, 4096),
        ("mimo-v2-flash", 9, 128),
        ("qwen3-next-80b-a3b", 12, None),
        ("minimax-text-01", 10, None),
        ("jamba-1.5-mini", 4, None),
        ("kimi-linear-48b-a3b", 7, None),
        ("deepseek-v3", 61, None),
        ("mamba-codestral-7b", 0, None),
        ("lfm2-350m", 6, None),
    ],
)
def test_layers_with_the_whole_context_are_counted(name, full, window):
    shape = shape_of(name)
    assert (shape.growing_layers, shape.sliding_window) == (full, window)


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [
        ("gemma-4-31b", 10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2, 1024),
        ("mimo-v2-flash", 9 * 4 * (192 + 128) * 2, 39 * 8 * (192 + 128) * 2, 128),
    ],
)
def test_layers_with_a_window_cache_their_own_heads(name, full, sliding, window):
    """Layers * values of a token * 2 bytes, from the folder's config and from the catalog."""
    for shape in (shape_of(name), find_model(name)):
        for tokens in (100, 32_768):
            expected = full * tokens + sliding * min(tokens, window)
            assert kv_bytes_per_sequence(shape, tokens) == expected
            assert kv_bytes_per_sequence(shape, tokens, tensor_parallel=4) == expected / 4
        assert limited_reads(shape, 1) == (window, pytest.approx(sliding / (full + sliding)))


@pytest.mark.parametrize(
    ("name", "layers", "effective", "full", "sliding"),
    [
        ("gemma-4-e2b", 35, 2.3e9, 3 * 2 * 512 * 2, 12 * 2 * 256 * 2),
        ("gemma-4-e4b", 42, 4.6e9, 4 * 2 * 2 * 512 * 2, 20 * 2 * 2 * 256 * 2),
    ],
)
def test_embeddings_of_each_layer_are_looked_up_and_shared_caches_count_once(name, layers, effective, full, sliding):
    """Gemma 4 E2B: 5.1e9 parameters with its encoders, 2.3e9 of them beside the embeddings of each
    layer, as its card says; 15 of 35 layers have a cache, 3 of them of the whole context."""
    shape = shape_of(name)
    assert shape.params_total - shape.params_active == 262_144 * 256 * layers
    assert shape.params_active == pytest.approx(effective, rel=0.03)
    streamed = StreamedParams.of(shape, "float16")
    assert (streamed.packed, streamed.rest_bytes) == (shape.params_active, 0)
    assert kv_bytes_per_sequence(shape, 10_000) == full * 10_000 + sliding * 512


def test_more_ranks_than_heads_share_those_of_windows_alone():
    """Gemma 4 31B on 16 devices: one of 4 heads for whole contexts on each, and one of 16."""
    expected = 10 * 2 * 512 * 2 * 32_768 + 50 * 2 * 256 * 2 * 1024
    assert kv_bytes_per_sequence(find_model("gemma-4-31b"), 32_768, tensor_parallel=16) == expected


def test_sparse_attention_reads_its_index_of_all_tokens_and_the_cache_of_some():
    """GLM-5: 576 values, and an FP8 index of 128 that is as large as 64 16-bit values."""
    shape = shape_of("glm-5")
    assert kv_bytes_per_token(shape) == 78 * (576 + 64) * 2
    assert limited_reads(shape, 8) == (2048, pytest.approx(576 / 640))


def test_an_encoder_takes_memory_and_is_not_read_by_text():
    """Scout: 34 layers of 4 * 1408**2 + 2 * 1408 * 5632, and a projection."""
    shape = shape_of("llama-4-scout")
    layers = 34 * (4 * 1408**2 + 2 * 1408 * 5632)
    assert layers <= shape.encoder_params <= 1.02 * layers
    text = replace(shape, params_total=shape.params_total - shape.encoder_params, encoder_params=0)
    assert StreamedParams.of(shape, "bfloat16") == StreamedParams.of(text, "bfloat16")


def test_heads_that_predict_more_tokens_are_counted_apart():
    """DeepSeek-V3's card: 671B of the main model and 14B with one more layer and its embeddings."""
    shape = shape_of("deepseek-v3")
    assert shape.mtp_layers == 1
    assert 11e9 < shape.mtp_params < 14e9


def test_an_unknown_architecture_is_planned_by_its_keys_and_says_so():
    config = CONFIGS["phi-4"] | {"model_type": "something_new"}
    shape = planning_shape("new", config)
    assert shape.params_total == shape_of("phi-4").params_total
    assert "something_new is not known" in shape.doubt


def tensors(folder, shapes):
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return offset


def test_without_keys_the_shapes_of_the_tensors_tell_the_size(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "something_new"}', encoding="utf-8")
    layers = {
        f"model.layers.{i}.{part}.weight": shape
        for i in range(3)
        for part, shape in {
            "attn.q_proj": [512, 512],
            "attn.k_proj": [256, 512],
            "attn.v_proj": [256, 512],
            "attn.o_proj": [512, 512],
            "mlp.up_proj": [2048, 512],
            "mlp.gate_proj": [2048, 512],
            "mlp.down_proj": [512, 2048],
        }.items()
    }
    num_bytes = tensors(tmp_path, {"model.embed_tokens.weight": [1000, 512], **layers})
    shape = find_model(str(tmp_path))
    assert shape.params_total == num_bytes // 2
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (3, 512, 1000)
    assert kv_bytes_per_token(shape) == 3 * 2 * 256 * 2
    assert "bytes of its tensors" in shape.doubt


def test_without_keys_or_shapes_the_index_gives_layers_and_bytes(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "something_new"}', encoding="utf-8")
    names = {f"model.layers.{i}.x.weight": "a.safetensors" for i in range(32)}
    index = {"metadata": {"total_size": 14_000_000_000}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    shape = find_model(str(tmp_path / "config.json"))
    assert (shape.num_layers, shape.params_total) == (32, 7_000_000_000)
    assert 3500 < shape.hidden_size < 4700


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "BF16", "shape": [64, 8]}, "it has no `data_offsets`"),
        (5, "an object is expected, not 5"),
        ({"shape": [64, 8], "data_offsets": ["a", 1600]}, "data_offsets must be a list"),
        ({"shape": [64, 8], "data_offsets": [0]}, "data_offsets must be a list"),
        ({"shape": [64, 8], "data_offsets": [0, 10**400]}, "data_offsets must be a list"),
        ({"shape": 64, "data_offsets": [0, 16]}, "shape must be a list"),
        ({"shape": [-64, 8], "data_offsets": [0, 16]}, "a size below 0"),
        ({"shape": [64, 8], "data_offsets": [16, 0]}, "a size below 0"),
    ],
)
def test_a_damaged_header_names_the_file_and_the_tensor(tmp_path, entry, says):
    (tmp_path / "config.json").write_text('{"model_type": "something_new"}', encoding="utf-8")
    text = json.dumps({"__metadata__": {}, "model.layers.0.k_proj.weight": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(InputError) as caught:
        find_model(str(tmp_path))
    assert f"{file}: tensor 'model.layers.0.k_proj.weight'" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ('{"metadata": {"total_size": "x"}, "weight_map": {}}', "total_size must be a number"),
        ('{"metadata": {"total_size": 1e400}, "weight_map": {}}', "total_size must be a number"),
        ('{"metadata": [1], "weight_map": {}}', "metadata must be an object"),
        ('{"weight_map": [1, 2]}', "weight_map must be an object"),
        ('{"weight_map": {"a.%s.b": "x"}}' % ("9" * 5000), "has no num_hidden_layers"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, index, says):
    (tmp_path / "config.json").write_text('{"model_type": "something_new"}', encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        find_model(str(tmp_path))


def test_nothing_known_is_one_line_with_the_missing_keys(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}', encoding="utf-8")
    with pytest.raises(InputError, match="has no num_hidden_layers, vocab_size") as caught:
        find_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_encoder_and_decoder_is_refused():
    with pytest.raises(InputError, match="only decoders are planned"):
        planning_shape("t5", CONFIGS["phi-4"] | {"is_encoder_decoder": True, "model_type": "t5"})


def places(config, before=()):
    """The path of every key, also of inner objects."""
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from places(value, (*before, key))


USUAL = {path[-1] for config in CONFIGS.values() for path in places(config)}


@pytest.mark.parametrize("name", ALL)
def test_whatever_a_key_holds_the_file_is_read_or_refused_in_one_line(name):
    refusals = []
    for path in places(ALL[name]):
        if name in MORE_CONFIGS and path[-1] in USUAL:
            continue
        for value in WRONG:
            config = copy.deepcopy(ALL[name])
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            try:
                planning_shape(name, config)
            except InputError as exc:
                refusals.append(str(exc))
    assert refusals or name in MORE_CONFIGS
    assert not any("\n" in each for each in refusals)


def nas_block(group, multiple):
    """A block of Llama-Nemotron's; group: query heads for each KV head, None: no attention."""
    attention = {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"ffn_mult": multiple, "no_op": multiple is None}}


def test_blocks_without_attention_or_with_a_narrow_mlp_are_counted_one_by_one():
    """8 KV heads of 128 in 54 of 80 blocks; widths 28,672 and 5,632 by DeciLM's rule."""
    blocks = [nas_block(8, 5.25)] * 54 + [nas_block(None, 1.0)] * 20 + [nas_block(None, None)] * 6
    config = {
        "model_type": "nemotron-nas",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "vocab_size": 128256,
        "block_configs": blocks,
    }
    shape = planning_shape("super", config)
    attention, mlp = 2 * 8192 * (8192 + 1024), 3 * 8192
    by_hand = 54 * (attention + mlp * 28_672) + 20 * mlp * 5_632 + 2 * 128256 * 8192
    assert shape.params_total == pytest.approx(by_hand, rel=1e-4)
    assert kv_bytes_per_token(shape) == 54 * 2 * 8 * 128 * 2
    assert not shape.doubt


def test_a_pattern_of_layers_repeats_and_bloom_has_its_own_key():
    config = {
        "model_type": "recurrent_gemma",
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "lru_width": 256,
        "block_types": ["recurrent", "recurrent", "attention"],
    }
    assert planning_shape("r", config).full_attention_layers == 2
    bloom = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "n_head": 16}
    assert planning_shape("b", bloom | {"vocab_size": 250880}).hidden_size == 1024


def test_longrope_is_planned_to_its_whole_context_though_the_engine_ends_earlier():
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 384,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
    }
    assert shape_from_hf_config("p", config).max_positions == 4096
    assert planning_shape("p", config).max_positions == 131_072
