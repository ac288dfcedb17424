"""config.json files of known models count what their publishers' weights have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.rotary import Rotary
from lmi_bench.models.folder import folder_name, read_object
from lmi_bench.models.hf_config import ARCHITECTURES, _rows, shape_from_hf_config, spec_from_hf_config
from tests.models.wrong_values import WRONG

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def sizes(layers, hidden, heads, kv_heads, ffn, vocab, positions):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def falcon(layers, hidden, heads, **more):
    size = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return size | {"vocab_size": 65024, "alibi": False, "bias": False} | more


NEW_FALCON = {"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 8}
# config.json as published, less what does not count
PUBLISHED = {
    "llama-2-7b": ("Llama", sizes(32, 4096, 32, 32, 11008, 32000, 4096)),
    "llama-2-70b": ("Llama", sizes(80, 8192, 64, 8, 28672, 32000, 4096)),
    "llama-3.1-8b": ("Llama", sizes(32, 4096, 32, 8, 14336, 128256, 131072) | {"rope_scaling": LLAMA3_ROPE}),
    "llama-3.2-1b": (
        "Llama",
        sizes(16, 2048, 32, 8, 8192, 128256, 131072)
        | {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE},
    ),
    "mistral-7b-v0.1": ("Mistral", sizes(32, 4096, 32, 8, 14336, 32000, 32768) | {"sliding_window": 4096}),
    "mistral-7b-v0.3": ("Mistral", sizes(32, 4096, 32, 8, 14336, 32768, 32768) | {"sliding_window": None}),
    "mixtral-8x7b": (
        "Mixtral",
        sizes(32, 4096, 32, 8, 14336, 32000, 32768)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "mixtral-8x22b": (
        "Mixtral",
        sizes(56, 6144, 48, 8, 16384, 32000, 65536)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "falcon-7b": ("Falcon", falcon(32, 4544, 71, multi_query=True, parallel_attn=True)),
    "falcon-40b": ("Falcon", falcon(60, 8192, 128, **NEW_FALCON)),
    "falcon-180b": ("Falcon", falcon(80, 14848, 232, tie_word_embeddings=False, **NEW_FALCON)),
    "qwen2.5-0.5b": (
        "Qwen2",
        sizes(24, 896, 14, 2, 4864, 151936, 32768)
        | {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768},
    ),
    "qwen2.5-7b": ("Qwen2", sizes(28, 3584, 28, 4, 18944, 152064, 131072)),
    "qwen3-0.6b": (
        "Qwen3",
        sizes(28, 1024, 16, 8, 3072, 151936, 40960) | {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "qwen3-32b": ("Qwen3", sizes(64, 5120, 64, 8, 25600, 151936, 40960) | {"head_dim": 128}),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        sizes(48, 2048, 32, 4, 6144, 151936, 40960)
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True},
    ),
}
WINDOWS = ["sliding_attention", "full_attention"]
SLIDING = {"layer_types": WINDOWS, "sliding_window": 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
MOE = {"moe_intermediate_size": 32}
COMPARED = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("max_positions", "params_total", "params_active", "tied_embeddings"),
    *("sliding_window", "full_attention_layers", "experts", "experts_per_token"),
    "expert_ffn_size",
)


def named(family, config):
    return {"architectures": [f"{family}ForCausalLM"]} | config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_shape_of_the_catalog(name):
    """The catalog's parameter counts are those of the published weights."""
    shape, known = shape_from_hf_config(name, named(*PUBLISHED[name])), find_model(name)
    assert {key: getattr(shape, key) for key in COMPARED} == {key: getattr(known, key) for key in COMPARED}


def test_falcons_first_config_files_give_the_shape_of_the_catalog():
    """Keys of the first publication: model_type RefinedWebModel (7B) and RefinedWeb (40B)."""
    common = {"architectures": ["RWForCausalLM"], "vocab_size": 65024, "alibi": False}
    small = common | {"hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": True}
    large = common | {"hidden_size": 8192, "n_head": 128, "n_layer": 60, "n_head_kv": 8}
    for name, config in (("falcon-7b", small), ("falcon-40b", large)):
        shape = shape_from_hf_config(name, config)
        assert shape.params_total == find_model(name).params_total
        assert shape.num_kv_heads == find_model(name).num_kv_heads


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 2048}, 4096),
        (LLAMA3_ROPE, 4096),
    ],
)
def test_scalings_that_stretch_the_trained_length_stretch_the_positions(rope, positions):
    """By transformers' convention; Llama 3.1 states its whole length itself."""
    config = sizes(2, 64, 4, 4, 96, 100, 4096) | {"rope_scaling": rope}
    assert shape_from_hf_config("m", named("Llama", config)).max_positions == positions


def test_yarn_without_a_factor_has_that_of_its_lengths():
    rope = {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    config = sizes(2, 64, 4, 4, 96, 100, 4096) | {"rope_scaling": rope}
    assert spec_from_hf_config("m", named("Llama", config)).rope["factor"] == 4.0


def test_qwens_window_begins_where_max_window_layers_says():
    """transformers: layers from max_window_layers on slide, if use_sliding_window is set."""
    config = sizes(4, 64, 4, 4, 96, 100, 4096) | {"sliding_window": 16, "max_window_layers": 3}
    off = spec_from_hf_config("m", named("Qwen2", config))
    on = spec_from_hf_config("m", named("Qwen2", config | {"use_sliding_window": True}))
    assert off.windows == (None,) * 4
    assert on.windows == (None, None, None, 16)
    assert on.shape("m").full_attention_layers == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "model 'm': architecture GPT2LMHeadModel is not supported; lmi-bench has: "
            "LlamaForCausalLM, MistralForCausalLM, MinistralForCausalLM",
        ),
        ({}, "architecture not named in config.json"),
        ({"architectures": 5}, "architecture not named in config.json"),
        (named("Llama", {"hidden_size": -8}), "hidden_size must be 0 or more, got -8"),
        (named("Llama", sizes(10**12, 64, 4, 4, 96, 100, 512)), "1000000000000 layers are more than 100000"),
        (named("Llama", {"hidden_size": "big"}), "hidden_size must be a whole number, got 'big'"),
        (named("Llama", {}), "config.json has none of hidden_size"),
        (named("Falcon", falcon(2, 64, 4, alibi=True)), "alibi is not supported"),
        *(
            (
                named("Llama", sizes(2, 64, 4, 4, 96, 100, 512) | {"rms_norm_eps": eps}),
                "rms_norm_eps must be 0 or more, got ",
            )
            for eps in (-1.0, math.nan, math.inf)
        ),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": sizes(2, 64, 4, 4, 96, 100, 512) | {"model_type": "ministral3"},
            },
            "Mistral3ForConditionalGeneration with a ministral3 text is not supported",
        ),
        (
            named("Llama", sizes(2, 64, 4, 4, 96, 100, 512) | {"layer_types": WINDOWS}),
            "layer_types slide but no window is set",
        ),
        (named("Mixtral", sizes(2, 64, 4, 4, 96, 100, 512) | SLIDING), "layer_types that alternate are not supported"),
        (
            named("Gemma2", sizes(2, 64, 4, 4, 96, 100, 512) | {"use_bidirectional_attention": 1}),
            "use_bidirectional_attention is not supported",
        ),
        (
            named("Llama", sizes(2, 64, 4, 4, 96, 100, 512) | {"rope_scaling": {"x": {}}}),
            r"rotary positions by layer \(\['x'\]\) are not supported",
        ),
        *(
            (
                named("Llama", sizes(2, 64, 4, 4, 96, 100, 512) | {"rope_scaling": YARN | wrong}),
                f"{next(iter(wrong))} must be",
            )
            for wrong in (
                *({"factor": value} for value in (math.nan, math.inf, -2, "x", [4])),
                *({"original_max_position_embeddings": value} for value in (math.nan, -1, "x")),
                *({"rope_theta": value} for value in (0, -1, "", [], True)),
                *({"beta_fast": value} for value in (math.nan, math.inf, "x", -2)),
            )
        ),
        (
            named("Llama", sizes(2, 64, 4, 4, 96, 100, 512) | {"partial_rotary_factor": 0.5}),
            "partial_rotary_factor 0.5 is not supported",
        ),
        (
            named("Mistral", sizes(2, 64, 4, 4, 96, 100, 512) | {"sliding_window": 0}),
            "sliding_window must be at least 1 token, got 0",
        ),
        (
            named(
                "Qwen2",
                sizes(2, 64, 4, 4, 96, 100, 512)
                | {"layer_types": ["sliding_attention"], "sliding_window": 4}
                | {"use_sliding_window": True},
            ),
            "layer_types must name sliding or full attention of each of 2 layers",
        ),
        (
            named("Qwen2", sizes(2, 64, 4, 4, 96, 100, 512) | {"layer_types": [{}, ["x"]]}),
            "layer_types must name sliding or full attention of each of 2 layers",
        ),
        *(
            (named("DeepseekV3", sizes(2, 64, 4, 4, 96, 100, 512) | MOE | {key: 0}), f"{key} must be above 0")
            for key in ("kv_lora_rank", "qk_rope_head_dim")
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(config, message):
    with pytest.raises(InputError, match=message) as caught:
        spec_from_hf_config("m", config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "theta", "eps"),
    [("Llama", 1e4, 1e-6), ("Mistral", 1e4, 1e-6), ("Mixtral", 1e6, 1e-5), ("Qwen2", 1e4, 1e-6)],
)
def test_settings_that_a_file_leaves_out_have_the_values_of_transformers(family, theta, eps):
    import transformers

    default = getattr(transformers, f"{family}Config")()
    spec = spec_from_hf_config("m", named(family, sizes(2, 64, 4, 4, 96, 100, 512)))
    assert (spec.rope["rope_theta"], spec.norm_eps) == (theta, eps)
    assert (default.rope_parameters["rope_theta"], default.rms_norm_eps) == (theta, eps)
    assert spec.tied_embeddings == default.tie_word_embeddings
    assert spec.windows[0] == getattr(default, "sliding_window", None)


def test_a_model_served_from_within_its_folder_has_the_folders_name(tmp_path, monkeypatch):
    """`serve --model .` named it with nothing, and no request could name it either."""
    inside = tmp_path / "llama-x" / "inside"
    inside.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "llama-x")
    monkeypatch.chdir(inside)
    names = [folder_name(Path(text)) for text in (".", "..", "../", str(tmp_path / "link"))]
    assert names == ["inside", "llama-x", "llama-x", "link"]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match=r"cannot read .*config.json: Is a directory") as told:
        read_object(tmp_path / "config.json")
    assert "\n" not in str(told.value)
    with pytest.raises(InputError, match="No such file"):
        read_object(tmp_path / "generation_config.json")


def test_a_name_longer_than_a_path_may_be_is_an_unknown_model():
    with pytest.raises(InputError, match="is not in the catalog"):
        find_model("m" * 300)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whatever_a_setting_holds_it_is_read_or_refused_in_one_line(architecture):
    """Each key with values that no file should have, alone and inside the rotary settings."""
    whole = sizes(2, 64, 4, 2, 96, 100, 512) | MOE | {"architectures": [architecture]}
    whole |= {"sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2}
    rope = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0, "truncate": True}
    keys = {*whole, *(key for row in _rows(ARCHITECTURES[architecture]).values() for key in row[0])}
    keys |= {"layer_types", "rope_scaling", "original_max_position_embeddings", "mlp_only_layers"}
    keys |= {"partial_rotary_factor", "decoder_sparse_step", "alibi", "multi_query"}
    edits = [{key: value} for key in sorted(keys) for value in WRONG]
    for kind in ("default", "linear", "dynamic", "llama3", "yarn"):
        inner = [{key: value} for key in (*rope, "type") for value in WRONG]
        edits += [{"rope_scaling": rope | {"rope_type": kind} | edit} for edit in inner]
    refusals = []
    for edit in edits:
        try:
            spec = spec_from_hf_config("m", whole | edit)
            Rotary(spec.rope, 16, dtype=torch.float32, device=torch.device("cpu"))
            spec.shape("m")
        except InputError as exc:
            refusals.append(str(exc))
    assert len(refusals) > 200
    assert not any("\n" in each for each in refusals)
