"""Model folders: what is read, and the one line that says what cannot be."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.batch import BatchEntry, StepBatch, StepKind
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings

PROMPT = (5, 17, 99, 3)


def load(folder):
    return TorchExecutor.load(folder, LoadSettings(dtype="float32", num_blocks=2, threads=1))


def first_token(folder):
    async def run():
        executor = load(folder)
        entry = BatchEntry(1, StepKind.PREFILL, PROMPT, 0, (0,), True, SamplingParams())
        outputs = await executor.execute(StepBatch(0, (entry,), StepShape()))
        await executor.close()
        return outputs[0].token_ids[0]

    return asyncio.run(run())


@pytest.fixture
def folder(llama, tmp_path):
    return shutil.copytree(llama.folder, tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_sharded_checkpoint_is_the_same_model(llama, tmp_path):
    llama.model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert not (tmp_path / "model.safetensors").exists()
    assert first_token(tmp_path) == llama.greedy(PROMPT, 1).token_ids[0]


def test_older_configs_with_rope_theta_at_the_top_are_read(make_llama, tmp_path):
    model = make_llama(rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    folder = shutil.copytree(model.folder, tmp_path / "model")
    change_config(folder, rope_parameters=None, rope_theta=77.0, rope_scaling=None)
    assert first_token(folder) == model.greedy(PROMPT, 1).token_ids[0]


def test_the_shape_is_that_of_the_config(llama):
    executor = load(llama.folder)
    shape = executor.model_shape
    assert (shape.num_layers, shape.num_heads, shape.head_dim) == (2, 4, 16)
    assert shape.params_total == sum(p.numel() for p in llama.model.parameters())
    asyncio.run(executor.close())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; .* has: LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture not named in config.json"),
        ({"auto_map": {"AutoModel": "own.py"}}, "runs no code from a model folder"),
        ({"trust_remote_code": True}, "runs no code from a model folder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with 'gptq'"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; llama needs silu"),
        ({"intermediate_size": 100}, r"shape \(96, 64\) but config.json asks for \(100, 64\)"),
        ({"num_hidden_layers": 3}, r"no tensor 'model.layers.2.input_layernorm.weight'"),
        (
            {"rope_parameters": {"rope_type": "axial", "factor": 2.0}},
            "RoPE scaling 'axial' is not supported; .* default, linear, dynamic, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope needs a short_factor of 8 numbers"),
        ({"rope_parameters": {"rope_type": "linear"}}, "RoPE scaling 'linear' needs factor"),
        ({"hidden_size": None}, "config.json has none of hidden_size"),
    ],
)
def test_what_config_json_asks_for_in_vain_is_said_in_one_line(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(InputError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_none_says_so(tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        load(tmp_path / "nowhere")


def test_a_folder_without_config_says_so(folder):
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="with a readable config"):
        load(folder)


def test_broken_config_says_so(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load(folder)


def test_pickled_weights_are_not_read(folder, llama):
    (folder / "model.safetensors").unlink()
    torch.save(llama.model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled weights are not read"):
        load(folder)


def test_a_cut_off_file_says_so(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load(folder)


def test_whole_numbers_are_no_weights(folder):
    """A checkpoint rounded to int8 whose config.json says nothing of it."""
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    with pytest.raises(InputError, match=f"{name}' is int8 instead of floats"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_is_refused(folder, value):
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][2, 1] = value
    save_file(tensors, path)
    with pytest.raises(InputError, match=rf"{name}' is {value} at \[2, 1\]"):
        load(folder)


def test_weights_whose_sum_passes_float32_are_still_weights(folder):
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][0, :2] = 3e38
    save_file(tensors, path)
    load(folder)


def test_a_missing_shard_is_named(llama, tmp_path):
    llama.model.save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InputError, match=f"lacks {shard.name}"):
        load(tmp_path)


def test_an_index_cannot_reach_outside_its_folder(folder, tmp_path):
    save_file(load_file(folder / "model.safetensors"), tmp_path / "other.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "../other.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(InputError, match="not in this folder"):
        load(folder)


def test_loading_tells_how_many_bytes_of_all_files_are_read(llama, tmp_path):
    """Steadily, and at the end all of them, though a file also holds its header."""
    llama.model.save_pretrained(tmp_path, max_shard_size="50KB")
    seen = []
    executor = TorchExecutor.load(
        tmp_path, LoadSettings(num_blocks=2, threads=1), progress=lambda done, total: seen.append((done, total))
    )
    asyncio.run(executor.close())
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    weights = sum(parameter.nbytes for parameter in llama.model.parameters())
    assert {total for _, total in seen} == {files}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (seen[-2][0], seen[-1][0]) == (weights, files)


def test_a_wrong_file_fails_in_the_middle_of_loading_and_not_after_it(folder):
    """Tensors are checked as they are read, so a model of many files fails at the wrong one."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors")
    seen = []
    with pytest.raises(InputError, match=r"layers.0.mlp.up_proj.weight' has shape \(3, 3\)"):
        TorchExecutor.load(
            folder, LoadSettings(num_blocks=2, threads=1), progress=lambda done, total: seen.append(done / total)
        )
    assert max(seen) < 0.9
