"""A float8 cache gives what a float32 cache of the rounded numbers gives, in every back end."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.torch_backend import layers
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.kv_cache import FLOAT8, KvLayoutShape
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.static.artefact import StaticShape
from lmi_bench.engine.torch_backend.static.build import StepSettings
from lmi_bench.engine.triton_backend.step import TritonStep
from lmi_bench.targets.back_ends import choose_back_end
from tests.engine.torch_backend.test_runner import PROMPT, Steps, entry
from tests.engine.torch_backend.tiny_models import TinyModel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
NEAR = 1e-4 if INTERPRETED else 0.02  # a sum's last bit may round a number to its neighbour
SHAPES = (StaticShape(2, 32),)
BACK_ENDS = {
    "torch": StepSettings(),
    "torch, prepared": StepSettings(captured=True, shapes=SHAPES),
    "triton": StepSettings(kernels=TritonStep, shapes=SHAPES),
}
SCORED = SamplingParams(logprobs=True)


def decoded(folder, kv_dtype, steps):
    """Tokens and their log-probabilities: a prompt in two chunks, then three tokens."""
    made = Steps(folder, block_size=16, kv_dtype=kv_dtype, steps=steps, device=DEVICE)
    outputs = made.run(entry(0, PROMPT[:5], 0, (2, 0), sampling=SCORED, samples=False))
    outputs = made.run(entry(0, PROMPT[5:], 5, sampling=SCORED))
    for done in range(3):
        outputs += made.run(entry(0, (LAST_SAMPLED,), len(PROMPT) + done, sampling=SCORED))
    asyncio.run(made.executor.close())
    return [output.token_ids for output in outputs], torch.tensor([o.logprobs for o in outputs])


@pytest.mark.parametrize("kv_dtype", ["float8", "bfloat16"])
def test_a_prompt_in_one_piece_reads_what_its_chunks_would(tmp_path, kv_dtype):
    """Else its scores, and the quality that `optimize` compares, would not show the cache."""
    TinyModel(tmp_path, "Llama", num_hidden_layers=1)
    scores = []
    for pieces in ((PROMPT,), (PROMPT[:1], PROMPT[1:])):
        made = Steps(tmp_path, block_size=16, kv_dtype=kv_dtype)
        for number, piece in enumerate(pieces):
            first = sum(map(len, pieces[:number]))
            blocks = (0,) if number == 0 else ()
            last = made.run(entry(0, piece, first, blocks, sampling=SCORED, samples=number + 1 == len(pieces)))
        scores += last[0].logprobs
        asyncio.run(made.executor.close())
    assert scores[0] == pytest.approx(scores[1], abs=NEAR)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
@pytest.mark.parametrize("name", BACK_ENDS)
def test_what_is_read_is_what_float8_keeps(tmp_path, monkeypatch, family, name):
    """Mistral's window is shorter than the context."""
    monkeypatch.setattr(layers, "packing_works", lambda *_: False)
    changes = {"sliding_window": 8} if family == "Mistral" else {}
    TinyModel(tmp_path, family, num_hidden_layers=1, **changes)
    exact = decoded(tmp_path, None, BACK_ENDS["torch"])
    tokens, logprobs = decoded(tmp_path, "float8", BACK_ENDS[name])

    def rounded(_, new):
        return new.to(FLOAT8).float()

    monkeypatch.setattr(KvLayoutShape, "stored", rounded)
    expected = decoded(tmp_path, None, BACK_ENDS["torch"])
    assert tokens == expected[0]
    torch.testing.assert_close(logprobs, expected[1], rtol=NEAR, atol=NEAR)
    assert (logprobs[1:] - exact[1][1:]).abs().max() > 1e-3, "the cache is not rounded"


def test_a_latent_cache_is_rounded_too(tmp_path, monkeypatch):
    TinyModel(tmp_path, "DeepseekV3")
    tokens, logprobs = decoded(tmp_path, "float8", StepSettings())
    monkeypatch.setattr(KvLayoutShape, "stored", lambda _, new: new.to(FLOAT8).float())
    expected = decoded(tmp_path, None, StepSettings())
    assert tokens == expected[0]
    torch.testing.assert_close(logprobs, expected[1], rtol=NEAR, atol=NEAR)


def test_numbers_beyond_float8_become_its_largest():
    layout = KvLayoutShape(1, 1, 4, 16, FLOAT8)
    stored = layout.stored(torch.tensor([1e4, -1e4, 448.0, 2.0**-6]))
    assert stored.view(FLOAT8).tolist() == [448.0, -448.0, 448.0, 2.0**-6]


def test_the_same_memory_has_twice_the_blocks_of_bfloat16(tmp_path, monkeypatch):
    TinyModel(tmp_path, "Llama")
    monkeypatch.setattr("lmi_bench.engine.torch_backend.rank.free_memory_bytes", lambda _: 40 << 20)
    loaded = {
        kind: TorchExecutor.load(tmp_path, LoadSettings(kv_dtype=kind, threads=1)) for kind in ("bfloat16", "float8")
    }
    wide, narrow = loaded["bfloat16"], loaded["float8"]
    assert narrow.num_blocks // 2 == wide.num_blocks
    assert narrow.kv_dtype == "float8"
    assert abs(narrow.kv_cache_bytes - wide.kv_cache_bytes) <= narrow.kv_cache_bytes / 100
    for executor in loaded.values():
        asyncio.run(executor.close())


@pytest.mark.skipif(not INTERPRETED, reason="about a machine without a GPU")
def test_what_has_no_float8_cache_says_so_in_one_line(tmp_path):
    back_end = choose_back_end(EngineSection(kv_dtype="float8"), [tmp_path], degree=1, block_size=64)
    assert back_end.note == "step back end torch; not native, because a float8 cache is torch's"
    TinyModel(tmp_path, "Llama")
    settings = LoadSettings(kv_dtype="float8", num_blocks=4, steps=StepSettings(compiled=True))
    with pytest.raises(InputError, match="leave --kv-dtype float8 out"):
        TorchExecutor.load(tmp_path, settings)
