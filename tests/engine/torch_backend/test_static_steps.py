"""Decode steps in prepared shapes: which shape a step gets, and that nothing but time changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import torch

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.torch_backend.attention import SequenceRows
from lmi_bench.engine.torch_backend.runner import TorchForward
from lmi_bench.engine.torch_backend.static.artefact import (
    StaticShape,
    covering,
    default_shapes,
    fitted,
    graph_shapes,
    parse_shapes,
)
from lmi_bench.engine.torch_backend.static.build import StepSettings
from lmi_bench.engine.torch_backend.static.forward import (
    CudaGraphRecorder,
    StaticForward,
    StepBuffers,
    StepResult,
    compare_steps,
    prepare_shapes,
)
from lmi_bench.engine.torch_backend.static.step import DecodeStep
from tests.engine.torch_backend.test_runner import PROMPT, Steps, entry
from tests.engine.torch_backend.tiny_models import FAMILIES, TinyModel

WITHOUT = ("GptOss", "DeepseekV3")  # sinks and latent attention have no such steps
ROWS = SequenceRows([9], 4, [2, 0], 1)


def test_a_step_runs_in_the_shape_with_the_fewest_padded_tokens():
    shapes = parse_shapes("1x512, 8x64,8x512 ,16x128")
    assert covering(shapes, 1, 60) == StaticShape(1, 512)  # 512 tokens, as many as 8x64
    assert covering(shapes, 2, 60) == StaticShape(8, 64)
    assert covering(shapes, 9, 65) == StaticShape(16, 128)
    assert covering(shapes, 8, 129) == StaticShape(8, 512)


@pytest.mark.parametrize(("sequences", "tokens"), [(17, 10), (1, 513), (9, 200)])
def test_a_step_that_nothing_covers_has_no_shape(sequences, tokens):
    assert covering(parse_shapes("8x512,16x128"), sequences, tokens) is None


@pytest.mark.parametrize("text", ["", "8", "8x", "x8", "8x8x8", "8*8", "-1x8", "1x0", "0x8"])
def test_shapes_are_two_numbers_from_one_on(text):
    with pytest.raises(InputError, match="shape"):
        parse_shapes(text)


def test_shapes_come_in_whole_blocks_and_none_is_longer_than_a_sequence():
    assert fitted(parse_shapes("2x65"), max_tokens=100, block_size=64) == (StaticShape(2, 128),)
    with pytest.raises(InputError, match=r"2x129: a sequence has at most 100 tokens"):
        fitted(parse_shapes("2x129"), max_tokens=100, block_size=64)


def test_compiled_shapes_are_few_and_captured_ones_reach_the_largest_batch():
    assert len(default_shapes(max_tokens=4096)) == 6
    one_page = fitted(default_shapes(max_tokens=40), max_tokens=40, block_size=64)
    assert one_page == tuple(StaticShape(sequences, 64) for sequences in (1, 4, 16))
    captured = graph_shapes(most_sequences=40, max_tokens=512)
    assert [shape.sequences for shape in captured] == [1, 2, 4, 8, 16, 32, 40]


def test_unused_rows_and_pages_point_to_the_spare_block():
    buffers = StepBuffers(StaticShape(3, 12), block_size=4, spare_block=77, device=torch.device("cpu"))
    buffers.fill([SequenceRows([5], 7, [1, 2, 3], 1)] * 3)
    buffers.fill([ROWS])
    assert buffers.token_ids.tolist() == [9, 0, 0]
    assert buffers.positions.tolist() == [4, 0, 0]
    assert buffers.block_tables.tolist() == [[2, 0, 77], [77] * 3, [77] * 3]


def test_every_input_starts_where_compiled_code_expects_it():
    buffers = StepBuffers(StaticShape(3, 12), block_size=4, spare_block=0, device=torch.device("cpu"))
    for tensor in (buffers.token_ids, buffers.positions, buffers.block_tables):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0


class Recorded:
    """Remembers the order of recording, and runs each step once as a capture's warm-up does."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def record(self, step):
        self.rows.append(step().likeliest.shape[0])
        return step


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_step_that_cannot_be_captured_names_the_way_out():
    recorder = CudaGraphRecorder(torch.device("cuda"))
    with pytest.raises(EngineError, match="--graphs off"):
        recorder.record(lambda: StepResult(torch.zeros(1, 1), torch.zeros(1)))


def test_shapes_are_recorded_once_the_largest_first_and_replayed_over_new_inputs():
    recorder = Recorded()

    def make_step(buffers):
        return lambda: StepResult(buffers.token_ids[:, None], buffers.token_ids + 1)

    make_buffers = partial(StepBuffers, block_size=4, spare_block=0, device=torch.device("cpu"))
    shapes = parse_shapes("1x8,4x8,2x8")
    prepared = prepare_shapes(shapes, make_buffers, make_step, recorder.record)
    assert recorder.rows == [4, 2, 1]
    held = prepared[StaticShape(2, 8)]
    addresses = set()
    for token_id in (3, 8):
        held.buffers.fill([SequenceRows([token_id], 0, [1], 1)])
        assert held.replay().likeliest.tolist() == [token_id + 1, 1]
        addresses.add(held.buffers.token_ids.data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 6}),
        ("Qwen3", {}),
        ("Mixtral", {}),
        ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_prepared_steps_give_the_tokens_of_transformers(make_model, family, changes):
    """Three sequences in a shape for four, in the order of the batch whatever their lengths."""
    model = make_model(family, **changes)
    steps = Steps(model.folder, num_blocks=24, steps=StepSettings(captured=True, shapes=(StaticShape(4, 24),)))
    prompts = (PROMPT[:7], PROMPT + PROMPT[:3], PROMPT[:2])
    tables = [tuple(range(6 * i, 6 * i + 6)) for i in range(3)]
    first = [entry(i, prompt, 0, tables[i]) for i, prompt in enumerate(prompts)]
    got = [list(tokens) for tokens in steps.tokens(*first)]
    for done in range(5):
        rows = [entry(i, (LAST_SAMPLED,), len(prompt) + done) for i, prompt in enumerate(prompts)]
        for i, tokens in zip((1, 2, 0), steps.tokens(*(rows[i] for i in (1, 2, 0))), strict=True):
            got[i].extend(tokens)
    forward = steps.executor._ranks.runner._forward
    asyncio.run(steps.executor.close())
    assert got == [model.greedy(prompt, 6).token_ids for prompt in prompts]
    assert (forward.static_steps, forward.other_steps) == (5, 1)


def test_steps_beyond_every_shape_and_drafts_run_as_ever(llama):
    """The context outgrows the shape's 12 tokens; three drafted tokens are verified."""
    steps = Steps(llama.folder, steps=StepSettings(captured=True, shapes=(StaticShape(2, 12),)))
    expected = llama.greedy(PROMPT, 9).token_ids
    got = list(steps.tokens(entry(1, PROMPT, 0, (0, 1, 2, 3, 4)))[0])
    for position in range(9, 13):
        got += steps.tokens(entry(1, (LAST_SAMPLED,), position))[0]
    got += steps.tokens(entry(1, (LAST_SAMPLED, *expected[5:8]), 13, drafts=3))[0]
    counts = steps.executor.step_counts
    asyncio.run(steps.executor.close())
    assert got == expected
    assert counts == (3, 3)


def test_log_probabilities_come_out_of_prepared_steps_too(llama):
    asked = SamplingParams(logprobs=True)
    found = []
    for shapes in ((), (StaticShape(4, 16),)):
        settings = StepSettings(captured=bool(shapes), shapes=shapes)
        steps = Steps(llama.folder, steps=settings)
        steps.run(entry(1, PROMPT, 0, (0, 1, 2), sampling=asked))
        found += steps.run(entry(1, (LAST_SAMPLED,), 9, sampling=asked))
        asyncio.run(steps.executor.close())
    eager, prepared = found
    assert prepared.token_ids == eager.token_ids
    assert prepared.logprobs == pytest.approx(eager.logprobs, abs=1e-5)


def test_padding_spoils_no_sequences_block(llama):
    """All blocks are given out; padded rows write to one beyond them."""
    steps = Steps(llama.folder, num_blocks=3, steps=StepSettings(captured=True, shapes=(StaticShape(4, 12),)))
    got = list(steps.tokens(entry(1, PROMPT, 0, (0, 1, 2)))[0])
    for position in range(9, 12):
        got += steps.tokens(entry(1, (LAST_SAMPLED,), position))[0]
    cache = steps.executor._ranks.runner._forward._otherwise.cache
    asyncio.run(steps.executor.close())
    assert got == llama.greedy(PROMPT, 4).token_ids
    assert cache.num_blocks == 4
    assert cache.keys[0][3].any()


def test_prepared_and_eager_steps_are_compared_shape_by_shape(llama):
    settings = StepSettings(captured=True, shapes=parse_shapes("1x12,3x16"))
    steps = Steps(llama.folder, num_blocks=32, steps=settings)
    differences = asyncio.run(steps.executor.compare_prepared())
    asyncio.run(steps.executor.close())
    assert [each.shape for each in differences] == [StaticShape(1, 12), StaticShape(3, 16)]
    for each in differences:
        assert each.largest < 1e-4 < each.spread
        assert each.same_frac == 1.0


def test_nothing_is_prepared_unless_asked_for():
    assert not StepSettings().wanted
    assert replace(StepSettings(), compiled=True).wanted


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT])
@pytest.mark.parametrize("head_dim", [16, 32])
def test_a_steps_logits_are_the_eager_ones(tmp_path, family, head_dim):
    """Also where the query heads together are as wide as the model, and where they are not."""
    TinyModel(tmp_path, family, **({} if family == "Falcon" else {"head_dim": head_dim}))
    steps = Steps(tmp_path)
    loaded = steps.executor._ranks.runner._forward
    model, cache = loaded.model, loaded.cache
    eager = TorchForward(model, cache, num_blocks=cache.num_blocks - 1)
    step = DecodeStep(model, cache)
    make_buffers = partial(StepBuffers, block_size=4, spare_block=eager.num_blocks, device=torch.device("cpu"))
    shapes = (StaticShape(1, 60), StaticShape(3, 20))
    prepared = prepare_shapes(shapes, make_buffers, step.over, lambda replay: replay)
    found = compare_steps(StaticForward(eager, prepared), eager)
    asyncio.run(steps.executor.close())
    assert [each.shape for each in found] == sorted(shapes)
    assert max(each.largest for each in found) < 1e-4
