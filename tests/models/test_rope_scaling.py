from __future__ import annotations

import json

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import parse_rope_scaling, rope_scaled_folder, shape_of_folder, with_rope_scaling
from lmi_bench.models.hf_config import spec_from_hf_config

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rope_theta": 500000.0,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def test_twice_the_factor_is_twice_the_positions(folder):
    assert shape_of_folder(folder).max_positions == 2048
    scaled = rope_scaled_folder(folder, parse_rope_scaling("linear:2"))
    assert shape_of_folder(scaled).max_positions == 4096
    assert scaled.name == "model-linear-2"
    assert (scaled / "model.safetensors").read_bytes() == b"weights"


def test_the_models_own_folder_is_left_as_it_was(folder):
    rope_scaled_folder(folder, parse_rope_scaling("yarn:4"))
    assert json.loads((folder / "config.json").read_text()) == LLAMA


def test_a_second_call_sees_what_has_changed_in_the_folder(folder):
    first = rope_scaled_folder(folder, parse_rope_scaling("linear:2"))
    (folder / "model.safetensors").unlink()
    (folder / "other.safetensors").write_bytes(b"new")
    again = rope_scaled_folder(folder, parse_rope_scaling("linear:2"))
    assert again == first
    assert sorted(entry.name for entry in again.iterdir()) == ["config.json", "other.safetensors"]


def test_a_scaling_of_its_own_is_replaced_and_counts_from_the_trained_length():
    own = LLAMA | {
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": 1e6,
            "original_max_position_embeddings": 1024,
        }
    }
    changed = with_rope_scaling(own, parse_rope_scaling("dynamic:8"))
    assert changed["rope_scaling"] == {
        "rope_type": "dynamic",
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 1e6,
    }
    assert changed["max_position_embeddings"] == 1024
    assert "rope_parameters" not in changed


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
@pytest.mark.parametrize(
    ("own", "trained"),
    [
        ({"architectures": ["Gemma3ForCausalLM"], "max_position_embeddings": 32768}, 32768),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            },
            4096,
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 512,
                "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
            512,
        ),
    ],
)
def test_every_family_is_stretched_from_its_trained_length(own, trained, kind):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100}
    config = LLAMA | sizes | {"hidden_size": 64, "head_dim": 16} | own
    spec = spec_from_hf_config("m", with_rope_scaling(config, parse_rope_scaling(f"{kind}:2")))
    assert spec.max_positions == 2 * trained
    kept = own.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    assert spec.rope["partial_rotary_factor"] == kept


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_settings_by_kind_of_layer_are_kept_and_those_with_a_window_not_stretched(is_wrapped):
    """As transformers 5 saves Gemma 3, alone or with its encoder of images."""
    kinds = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 3e3}}
    text = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    text |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_parameters": kinds}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    changed = with_rope_scaling(outer if is_wrapped else text, parse_rope_scaling("linear:2"))
    spec = spec_from_hf_config("m", changed)
    assert (spec.rope["rope_type"], spec.rope["factor"], spec.rope["rope_theta"]) == ("linear", 2.0, 5e5)
    assert (spec.window_rope["rope_type"], spec.window_rope["rope_theta"]) == ("default", 3e3)
    assert spec.max_positions == 4096


@pytest.mark.parametrize("wrong", ["linear", "linear:1", "linear:x", "llama3:4", "yarn:-2", ":2"])
def test_what_is_no_scaling_is_refused_with_an_example(wrong):
    with pytest.raises(InputError, match="linear:2"):
        parse_rope_scaling(wrong)
