"""A whole model through the Triton kernels against transformers, and when they are refused."""

from __future__ import annotations

import asyncio

import pytest
import torch
from triton.runtime.errors import OutOfResources

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.torch_backend import layers
from lmi_bench.engine.torch_backend.static.artefact import StaticShape
from lmi_bench.engine.torch_backend.static.build import StepSettings
from lmi_bench.engine.triton_backend import ops
from lmi_bench.engine.triton_backend.step import TritonStep, unsupported
from lmi_bench.models.hf_config import spec_from_hf_config
from lmi_bench.targets.back_ends import choose_back_end, step_settings
from tests.engine.torch_backend.test_runner import PROMPT, Steps, entry
from tests.engine.torch_backend.tiny_models import TinyModel


@pytest.fixture
def plain_weights(monkeypatch):
    """Weights as they are on a GPU: a CPU's packed ones have no address to read from."""
    monkeypatch.setattr(layers, "packing_works", lambda *_: False)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 12, "num_hidden_layers": 1}),
        ("Qwen3", {}),
        ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 2}),
        ("Glm4Moe", {}),
    ],
)
def test_greedy_tokens_are_those_of_transformers(tmp_path, plain_weights, family, changes):
    """Two sequences of different lengths, one of them over a page's border; a third row pads."""
    model = TinyModel(tmp_path, family, **changes)
    steps = Steps(tmp_path, block_size=16, steps=StepSettings(kernels=TritonStep, shapes=(StaticShape(3, 32),)))
    prompts = (PROMPT + PROMPT[:5], PROMPT[:3])
    got = [
        list(tokens)
        for tokens in steps.tokens(*(entry(i, prompt, 0, (2 * i, 2 * i + 1)) for i, prompt in enumerate(prompts)))
    ]
    for done in range(2):
        step = steps.tokens(*(entry(i, (LAST_SAMPLED,), len(prompt) + done) for i, prompt in enumerate(prompts)))
        for tokens, new in zip(got, step, strict=True):
            tokens.extend(new)
    forward = steps.executor._ranks.runner._forward
    asyncio.run(steps.executor.close())
    assert got == [model.greedy(prompt, 3).token_ids for prompt in prompts]
    assert (forward.static_steps, forward.other_steps) == (2, 1)


@pytest.mark.parametrize("logprobs", [False, True])
def test_decode_rows_beside_a_prompt_run_in_their_prepared_shape(tmp_path, plain_weights, monkeypatch, logprobs):
    """Prompt, decode, chunk without a token, decode: each gets its own tokens, in that order."""
    model = TinyModel(tmp_path, "Qwen3")
    steps = Steps(tmp_path, block_size=16, steps=StepSettings(kernels=TritonStep, shapes=(StaticShape(3, 32),)))
    sampling = SamplingParams(logprobs=logprobs)
    first, second, third, fourth = PROMPT + PROMPT[:5], PROMPT[:3], PROMPT[::-1], PROMPT[4:]
    steps.tokens(entry(0, first, 0, (0, 1)), entry(1, second, 0, (2, 3)))
    forward, seen = steps.executor._ranks.runner._forward, []
    logits = forward._otherwise.logits
    monkeypatch.setattr(forward._otherwise, "logits", lambda rows: seen.append(len(rows)) or logits(rows))
    got = steps.tokens(
        entry(2, third, 0, (4, 5), sampling=sampling),
        entry(0, (LAST_SAMPLED,), len(first), sampling=sampling),
        entry(3, fourth[:2], 0, (6, 7), samples=False),
        entry(1, (LAST_SAMPLED,), len(second), sampling=sampling),
    )
    assert (seen, forward.static_steps, forward.other_steps) == ([2], 0, 2)
    got += steps.tokens(entry(3, fourth[2:], 2))
    asyncio.run(steps.executor.close())
    expected = [model.greedy(prompt, 2).token_ids for prompt in (third, first, second, fourth)]
    assert got == [(expected[0][0],), (expected[1][1],), (), (expected[2][1],), (expected[3][0],)]


def test_a_kernel_that_asks_too_much_of_a_gpu_names_another_back_end(tmp_path, plain_weights, monkeypatch):
    """Triton's own errors are no RuntimeErrors, as torch's are."""

    def too_large(*_, **__):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(ops, "paged_attention", too_large)
    TinyModel(tmp_path, "Llama")
    steps = Steps(tmp_path, block_size=16, steps=StepSettings(kernels=TritonStep, shapes=(StaticShape(1, 32),)))
    steps.tokens(entry(0, PROMPT, 0, (0, 1)))
    with pytest.raises(EngineError, match="--backend torch --device cuda"):
        steps.tokens(entry(0, (LAST_SAMPLED,), len(PROMPT)))
    asyncio.run(steps.executor.close())


def test_nothing_is_held_twice_for_the_joined_gate_and_up(tmp_path, plain_weights):
    TinyModel(tmp_path, "Llama")
    kept = []

    def kernels(eager):
        kept.append(eager.model)
        return TritonStep(eager)

    steps = Steps(tmp_path, block_size=16, steps=StepSettings(kernels=kernels))
    asyncio.run(steps.executor.close())
    (model,) = kept
    for layer in model.layers:
        gate, up = layer.mlp.gate.weight, layer.mlp.up.weight
        assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("config", "block_size", "why"),
    [
        ({"model_type": "falcon", "architectures": ["FalconForCausalLM"]}, 64, "falcon"),
        ({}, 48, "not a power of two"),
        ({}, 8, "not a power of two >= 16"),
    ],
)
def test_models_without_kernels_are_named(config, block_size, why):
    spec = spec_from_hf_config("m", LLAMA | config)
    assert why in unsupported(spec, block_size)
    assert unsupported(spec_from_hf_config("m", LLAMA), 64) is None


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_back_end_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="--backend triton needs a GPU"):
        choose_back_end(EngineSection(backend="triton"), [tmp_path], degree=1, block_size=64)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "triton", "device": "cpu"}, "leave --device cpu out"),
        ({"backend": "native", "device": "cuda"}, "leave --device cuda out"),
        ({"backend": "native", "compile": True}, "leave --compile out"),
    ],
)
def test_settings_that_exclude_each_other_say_which_to_leave_out(tmp_path, settings, words):
    with pytest.raises(InputError, match=words):
        choose_back_end(EngineSection(**settings), [tmp_path], degree=1, block_size=64)


def test_compiled_steps_are_torchs_and_an_artefact_is_compiled_already(tmp_path):
    compiled = EngineSection(compile=True, compile_shapes="2x64")
    back_end = choose_back_end(compiled, [tmp_path], degree=1, block_size=64)
    assert back_end.name == "torch"
    assert step_settings(compiled, back_end).shapes == (StaticShape(2, 64),)
    both = EngineSection(compile=True, artefact="x")
    with pytest.raises(InputError, match="an artefact is compiled already"):
        step_settings(both, back_end)
    shaped = EngineSection(artefact="x", compile_shapes="2x64")
    with pytest.raises(InputError, match="an artefact has its own shapes"):
        step_settings(shaped, back_end)
