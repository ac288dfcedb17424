"""Weights stored in another form than the layers ask for give what the plain floats give."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lmi_bench.core.errors import InputError
from lmi_bench.engine.native_backend.executor import NativeExecutor
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.quantization.rounding import QuantizedWeight
from lmi_bench.engine.torch_backend.weights import Checkpoint, read_model
from lmi_bench.models.hf_config import spec_from_hf_config
from tests.engine.torch_backend.scores import TOKENS, scores


def rewritten(folder, place, tensors, **changes):
    """A copy of a model's folder with other tensors and keys of config.json."""
    shutil.copytree(folder, place)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def stored(model):
    return load_file(model.folder / "model.safetensors")


@pytest.mark.parametrize("prefix", [{"model.": "language_model.model."}, {"model.": "model.language_model."}])
def test_a_wrapper_of_a_text_model_gives_the_text_models_output(make_model, tmp_path, prefix):
    model = make_model("Mistral")
    ((old, new),) = prefix.items()
    tensors = {name.replace(old, new, 1): tensor for name, tensor in stored(model).items()}
    if "language_model.model." in new:
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    tensors["vision_tower.patch.weight"] = torch.ones(4, 4)
    text = json.loads((model.folder / "config.json").read_text())
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    folder = rewritten(model.folder, tmp_path / "m", tensors)
    (folder / "config.json").write_text(json.dumps(outer))
    torch.testing.assert_close(scores(folder), scores(model.folder))


def test_gemma_3_with_its_encoder_as_transformers_saves_it_gives_its_text(tmp_path):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 8, "vocab_size": 211}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    config = transformers.Gemma3Config(
        text_config=sizes | text | {"initializer_range": 0.2, "pad_token_id": 2},
        vision_config=sizes | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=210,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "m")
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]
    torch.testing.assert_close(scores(tmp_path / "m"), wanted, atol=1e-4, rtol=1e-4)


def test_mxfp4_experts_are_the_floats_that_they_stand_for(make_model, tmp_path):
    """transformers' own conversion is the reference."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, generator = make_model("GptOss"), torch.Generator().manual_seed(3)
    floats, packed = stored(model), stored(model)
    for name in [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = floats[name].shape
        size = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, size, generator=generator, dtype=torch.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        del packed[name]
        floats[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    ours = scores(rewritten(model.folder, tmp_path / "packed", packed, **method))
    torch.testing.assert_close(ours, scores(rewritten(model.folder, tmp_path / "f", floats)))


def rounded_by(kind, weight, size=32):
    """Stored parts of a weight, and the floats that they mean, by the formats' definitions."""
    rows, columns = weight.shape
    if kind == "fp8":
        blocks = weight.view(rows // 32, 32, columns // 32, 32)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        wide = scale[:, None, :, None].expand(blocks.shape).reshape(rows, columns)
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}, values.float() * wide
    if kind == "int8":
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        values = (weight / scale).round().to(torch.int8)
        return {"weight": values, "weight_scale": scale}, values.float() * scale
    if kind.startswith("float8"):
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        parts = {} if kind == "float8" else {"input_scale": torch.ones(1)}
        scale = scale.amax().view(1) if parts else scale  # one of the whole tensor
        values = (weight / scale).to(torch.float8_e4m3fn)
        return parts | {"weight": values, "weight_scale": scale}, values.float() * scale
    grouped = weight.view(rows, columns // size, size)
    scale = (grouped.abs().amax(dim=2) / 7).half().float()
    values = (grouped / scale[..., None]).round().clamp(-8, 7)
    nibbles = (values.view(rows, columns // 8, 8).long() + 8) << torch.arange(0, 32, 4)
    packed = nibbles.sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    parts = {"weight_packed": packed, "weight_scale": scale}
    parts["weight_shape"] = torch.tensor([rows, columns])
    return parts, (values * scale[..., None]).view(rows, columns)


def rounded_folder(model, place, kind, size=32, **stated_too):
    """A model's folder with its projections rounded, and every tensor's floats."""
    rounded, floats = stored(model), stored(model)
    for name in [name for name in floats if "_proj.weight" in name]:
        base = name.removesuffix("weight")
        parts, floats[name] = rounded_by(kind, rounded.pop(name), size)
        rounded |= {f"{base}{part}": tensor for part, tensor in parts.items()}
    stated = {"quant_method": "compressed-tensors", "format": FORMATS[kind]}
    if kind == "fp8":
        stated = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    stated |= stated_too
    return rewritten(model.folder, place, rounded, quantization_config=stated), floats


FORMATS = {"fp8": "", "int8": "int-quantized", "int4": "pack-quantized"}
FORMATS |= dict.fromkeys(("float8", "float8, static inputs"), "float-quantized")


@pytest.mark.parametrize("kind", FORMATS)
def test_rounded_checkpoints_are_read_as_the_floats_that_they_stand_for(make_model, tmp_path, kind):
    model = make_model("Llama")
    folder, floats = rounded_folder(model, tmp_path / "q", kind)
    ours = scores(folder)
    for name in [name for name in floats if "_proj.weight" in name]:
        floats[name] = floats[name].to(torch.bfloat16).float()
    wanted = scores(rewritten(model.folder, tmp_path / "f", floats))
    torch.testing.assert_close(ours, wanted)
    assert (ours - scores(model.folder)).abs().max() > 0.01
    told = TorchExecutor.load(folder, LoadSettings(num_blocks=2, threads=1)).weights_description
    unread = "; 14 tensors that no layer reads (model.layers.0.mlp.down_proj.input_scale" * ("static" in kind)
    assert told.partition(", model")[0].endswith(f"weights of 4 or 8 bits became floats{unread}")


def groups_of(*sizes):
    weights = [{"num_bits": 4, "strategy": "group", "group_size": size} for size in sizes]
    return {"config_groups": {f"group_{i}": {"weights": each} for i, each in enumerate(weights)}}


@pytest.mark.parametrize("sizes", [(24,), (32,), (48, None), (32, 48)])
def test_groups_have_the_size_that_config_json_states(make_model, tmp_path, sizes):
    model = make_model("Llama", hidden_size=96, head_dim=24)
    size = sizes[-1] or sizes[0]
    folder, floats = rounded_folder(model, tmp_path / "q", "int4", size, **groups_of(*sizes))
    for name in [name for name in floats if "_proj.weight" in name]:
        floats[name] = floats[name].to(torch.bfloat16).float()
    wanted = scores(rewritten(model.folder, tmp_path / "f", floats))
    torch.testing.assert_close(scores(folder), wanted)


@pytest.mark.parametrize(
    ("kind", "stated", "words"),
    [
        ("int4", groups_of(24), "has 2 scales for 64 values, but config.json states .* of 24"),
        ("int4", groups_of(48, 40), "states blocks of 40, 48"),
        ("fp8", {"weight_block_size": [32, 16]}, "has 2 scales for 64 values"),
        ("fp8", {"weight_block_size": 32}, "quantization_config cannot be read"),
        ("int4", {"config_groups": [1]}, "quantization_config cannot be read"),
        ("int8", {"transform_config": {"config_groups": {"R4": {}}}}, "transform_config is not"),
    ],
)
def test_sizes_that_differ_from_the_stated_are_refused(make_model, tmp_path, kind, stated, words):
    folder, _ = rounded_folder(make_model("Llama"), tmp_path / "q", kind, **stated)
    with pytest.raises(InputError, match=words):
        scores(folder)


def test_a_last_block_of_fewer_inputs_is_exact_in_parts_too(make_model, tmp_path):
    """On a GPU a matrix keeps its bytes: 96 inputs in blocks of 64."""
    model = make_model("Llama")
    tensors, name = stored(model), "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.tensor([[2.0, 3.0]])
    method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    folder = rewritten(model.folder, tmp_path / "m", tensors, **method)
    with Checkpoint(folder, spec=read_model(folder).spec) as checkpoint:
        weight = QuantizedWeight(*checkpoint.parts(name))
        factors = torch.tensor([2.0, 3.0]).repeat_interleave(64)[:96]
        torch.testing.assert_close(weight.floats(), tensors[name].float() * factors)
        torch.testing.assert_close(checkpoint.whole(name).float(), weight.floats())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("weight_zero_point", "a zero or an order are not supported"),
        ("weight_g_idx", "a zero or an order are not supported"),
        ("weight_global_scale", r"two scales \(NVFP4\) are not supported"),
    ],
)
def test_forms_that_would_be_read_wrongly_are_refused(make_model, tmp_path, part, words):
    model = make_model("Llama")
    tensors = stored(model) | {f"model.layers.0.mlp.up_proj.{part}": torch.ones(2)}
    if part == "weight_global_scale":  # as such a folder has its weights
        tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(96, 4)
        tensors["model.layers.0.mlp.up_proj.weight_packed"] = torch.ones(96, 32, dtype=torch.uint8)
    with pytest.raises(InputError, match=words):
        scores(rewritten(model.folder, tmp_path / "m", tensors))


@pytest.mark.parametrize("load", [TorchExecutor.load, NativeExecutor.load])
def test_a_fused_matrix_of_another_size_is_refused(make_model, load):
    """With one KV head fewer, V would be read from the second K head."""
    model = make_model("Phi3", num_key_value_heads=2)
    path = model.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": 1}))
    with pytest.raises(InputError, match=r"has 128 rows, but config.json asks for 96"):
        load(model.folder, LoadSettings(num_blocks=2, threads=1))


@pytest.mark.parametrize(
    ("family", "rope", "words"),
    [
        ("Llama", {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "a rope_theta above 1, not 1.0"),
        (
            "Phi3",
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": ["x"] * 8,
                "long_factor": [1.0] * 8,
                "original_max_position_embeddings": 64,
            },
            "longrope needs a short_factor of 8 numbers",
        ),
    ],
)
def test_rotary_settings_that_compute_nothing_are_one_line(make_model, tmp_path, family, rope, words):
    model = make_model(family)
    folder = rewritten(model.folder, tmp_path / "m", stored(model), rope_parameters=rope)
    with pytest.raises(InputError, match=words):
        scores(folder)


@pytest.mark.parametrize("load", [TorchExecutor.load, NativeExecutor.load])
def test_another_head_in_the_file_of_a_tied_model_is_taken(make_llama, tmp_path, load):
    """As transformers does; a copy of the embedding is no other head."""
    model = make_llama(tie_word_embeddings=True, initializer_range=0.1)
    tensors = stored(model)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    folder = rewritten(model.folder, tmp_path / "m", tensors)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = theirs(torch.tensor([TOKENS])).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]
    ours = scores(folder, load=load, block_size=16)
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [TorchExecutor.load, NativeExecutor.load])
def test_tensors_that_no_layer_reads_are_named(make_llama, tmp_path, load):
    model = make_llama(num_key_value_heads=2)
    tensors = stored(model) | {"model.layers.2.extra.weight": torch.ones(2)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    settings = LoadSettings(num_blocks=2, threads=1)
    loaded = load(rewritten(model.folder, tmp_path / "m", tensors), settings)
    told = "1 tensor that no layer reads (model.layers.2.extra.weight)"
    assert loaded.weights_description.endswith(told)
    assert "no layer" not in load(model.folder, settings).weights_description


def test_what_gemma_3_leaves_out_is_transformers_default():
    """The published 4B's text_config: heads, vocabulary and positions are not stated."""
    stated = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    whole = transformers.Gemma3Config(text_config=dict(stated)).to_dict()
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    found = spec_from_hf_config("m", config | {"text_config": stated})
    assert found == spec_from_hf_config("m", config | {"text_config": whole["text_config"]})
    assert (found.vocab_size, found.num_heads, found.num_kv_heads) == (262208, 8, 4)
