"""What the native step owes the runner: exact repetition in any company, rounding, clean ends."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.engine.native_backend.executor import NativeExecutor, packed
from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.torch_backend.attention import SequenceRows
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from tests.engine.torch_backend.test_runner import entry, step

PROMPT = (5, 17, 99, 3, 42, 7, 150, 8, 61, 20, 21, 22)


@pytest.fixture
def open_step(make_model, compiled):
    """Load a tiny model; what is open is closed at the end."""
    opened = []

    def load(family="Llama", *, changes=None, variant="", **settings):
        model = make_model(family, **(changes or {}))
        usual = {"dtype": "float32", "num_blocks": 24, "block_size": 16, "threads": 1}
        executor = NativeExecutor.load(
            model.folder, LoadSettings(**usual | settings), compiled=compiled, variant=variant
        )
        opened.append(executor)
        return model, executor

    yield load
    for executor in opened:
        asyncio.run(executor.close())


def rows(token_ids, first, blocks, sampled):
    return SequenceRows(list(token_ids), first, list(blocks), sampled)


def in_chunks(forward, token_ids, cuts, blocks):
    """Logits of every position of one sequence that comes in chunks."""
    bounds = [0, *cuts, len(token_ids)]
    return torch.cat([forward.logits([rows(token_ids[a:b], a, blocks, b - a)]) for a, b in itertools.pairwise(bounds)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("family", "changes"), [("Llama", {}), ("Mistral", {"sliding_window": 9})])
def test_logits_are_the_same_bit_by_bit_in_any_batch_chunk_and_number_of_threads(
    open_step, family, changes, kv_heads, dtype
):
    chance = random.Random(3)
    changes = {"num_key_value_heads": kv_heads} | changes
    token_ids = [chance.randrange(3, 211) for _ in range(90)]
    _, alone = open_step(family, changes=changes, dtype=dtype)
    _, many = open_step(family, changes=changes, dtype=dtype, threads=3)
    whole = in_chunks(alone._forward, token_ids, [], range(6))
    single = in_chunks(alone._forward, token_ids, range(1, 90), range(6, 12))
    assert torch.equal(whole, single)
    others = [rows([9, 8, 7], 0, (20,), 0), rows(token_ids[:50], 0, range(16, 20), 1)]
    forward = many._forward
    forward.logits([rows(token_ids[:70], 0, range(6), 0)])
    beside = forward.logits([others[0], rows(token_ids[70:], 70, range(6), 20), others[1]])
    assert torch.equal(beside[:20], whole[70:])
    assert torch.equal(beside[20], whole[49])


@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 16), ("bfloat16", 48)])
def test_a_row_alone_reads_a_long_cache_as_the_rows_of_a_prompt_do(open_step, dtype, block_size):
    """Past 512 tokens, where the softmax is corrected, in blocks of one and of several sixteens."""
    chance = random.Random(5)
    token_ids = [chance.randrange(3, 211) for _ in range(560)]
    changes = {"num_key_value_heads": 4, "max_position_embeddings": 1024}
    settings = {"block_size": block_size, "num_blocks": 80, "dtype": dtype}
    for variant in ("", "portable"):
        model, executor = open_step(changes=changes, variant=variant, **settings)
        blocks, others = range(36), range(36, 72)
        forward = executor._forward
        whole = in_chunks(forward, token_ids, [], blocks)
        forward.logits([rows(token_ids[:500], 0, others, 0)])
        single = in_chunks(forward, token_ids, [*range(500, 516), 555], others)
        assert torch.equal(whole[500:], single[500:])
        if dtype == "float32":
            expected = model.logits(token_ids)[500:]
            torch.testing.assert_close(single[500:], expected, rtol=1e-3, atol=1e-4)


def test_float32_logits_are_those_of_transformers(open_step):
    model, executor = open_step()
    got = in_chunks(executor._forward, PROMPT, [6, 11], (7, 2))
    torch.testing.assert_close(got, model.logits(PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 5}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        *((f"Gemma{n}", {}) for n in ("", 2, 3)),
    ],
)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(open_step, family, changes):
    """Stated tolerance, that of the torch back end: against float32, root mean square error at
    most 5 % of the logits' spread, and at most 1.5 times that of transformers in bfloat16."""
    model, executor = open_step(family, changes=changes, dtype="bfloat16")
    exact = model.logits(PROMPT)
    rounded = copy.deepcopy(model.model).to(torch.bfloat16)(torch.tensor([PROMPT])).logits[0]

    def error(logits):
        return (logits.float() - exact).square().mean().sqrt() / exact.std()

    got = error(in_chunks(executor._forward, PROMPT, [6, 11], (7, 2)))
    assert 0 < got < 0.05
    assert got < 1.5 * error(rounded)


def test_the_likeliest_token_is_the_first_of_the_highest_logits(open_step):
    _, executor = open_step()
    for count in range(1, 12):
        sequences = [rows(PROMPT[:count], 0, (3,), count)]
        logits = executor._forward.logits(sequences)
        assert executor._forward.likeliest(sequences) == logits.argmax(-1).tolist()


def test_of_equal_logits_the_first_is_the_likeliest(make_model, compiled):
    model = make_model("Llama", tie_word_embeddings=False)
    [file] = model.folder.glob("*.safetensors")
    weights = load_file(file)
    head = weights["lm_head.weight"]
    for start in (32, 64, 103):  # in the same panel and in later ones
        head[start : start + 20] = head[:20]
    save_file(weights, file, metadata={"format": "pt"})
    settings = LoadSettings(dtype="float32", num_blocks=4, block_size=16, threads=1)
    executor = NativeExecutor.load(model.folder, settings, compiled=compiled)
    prompts = [rows([token], 0, (0,), 1) for token in range(3, 120)]
    found = [executor._forward.likeliest([prompt])[0] for prompt in prompts]
    logits = torch.cat([executor._forward.logits([prompt]) for prompt in prompts])
    asyncio.run(executor.close())
    first = [min(torch.nonzero(row == row.max()).flatten().tolist()) for row in logits]
    assert found == first
    assert sum(token < 20 for token in found) > 10


def test_drafts_are_verified_and_samples_drawn_as_in_the_torch_back_end(open_step):
    model, executor = open_step()
    run = lambda *entries: asyncio.run(executor.execute(step(*entries)))  # noqa: E731
    expected = model.greedy(PROMPT, 5).token_ids
    run(entry(1, PROMPT, 0, (0, 1)))
    drafted = (LAST_SAMPLED, *expected[1:3], (expected[3] + 1) % 211)
    assert list(run(entry(1, drafted, 12, drafts=3))[0].token_ids) == expected[1:4]
    asked = SamplingParams(logprobs=True, temperature=1.7, top_k=20, seed=3)
    drawn = run(entry(2, PROMPT, 0, (4,), sampling=asked))[0]
    wanted = torch.log_softmax(model.logits(PROMPT)[-1], -1)[drawn.token_ids[0]].item()
    assert drawn.logprobs == pytest.approx((wanted,), abs=1e-4)


def test_openai_penalties_work_on_its_logits(open_step):
    """A token that the answer holds twice gains 2 + 2 * 2: it comes in place of the likeliest."""
    model, executor = open_step()
    wish = SamplingParams(presence_penalty=-2.0, frequency_penalty=-2.0)
    answered = (*PROMPT, 100, 100)
    row = replace(entry(1, answered, 0, (0, 1), sampling=wish), num_generated=2)
    expected = model.logits(answered)[-1].clone()
    assert int(expected.argmax()) != 100
    expected[100] += 6
    assert int(expected.argmax()) == 100
    assert asyncio.run(executor.execute(step(row)))[0].token_ids == (100,)


def test_given_tokens_are_scored_as_transformers_scores_them(open_step):
    model, executor = open_step()
    continuation = [4, 77, 13, 200, 9]
    logprobs = torch.log_softmax(model.logits([*PROMPT, *continuation]), -1)
    expected = [logprobs[len(PROMPT) - 1 + i, t].item() for i, t in enumerate(continuation)]
    assert asyncio.run(executor.score(PROMPT, continuation)) == pytest.approx(expected, abs=1e-4)


def test_a_panel_has_64_outputs_side_by_side_and_zeros_behind_the_last():
    weight = torch.arange(70 * 4).view(70, 4).float()
    plain, pairs = packed(weight), packed(weight.to(torch.bfloat16))
    assert plain.shape == (2, 4, 64)
    assert plain[0, 3, 5] == weight[5, 3]
    assert plain[1, 2, 5] == weight[69, 2]
    assert plain[1, :, 6:].abs().sum() == 0
    halves = pairs.view(torch.bfloat16).view(2, 2, 64, 2)
    assert halves[0, 1, 5].tolist() == weight[5, 2:4].to(torch.bfloat16).tolist()


def test_the_cache_takes_the_bytes_of_the_formula(open_step):
    """2 * layers * kv_heads * head_dim * bytes a token."""
    _, executor = open_step(changes={"num_key_value_heads": 2}, dtype="float32", kv_dtype="bfloat16")
    assert executor.kv_cache_bytes == 24 * 16 * 2 * 2 * 2 * 16 * 2
    assert executor.kv_dtype == "bfloat16"


def threads_here() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_close_ends_the_threads_of_the_library(make_model, compiled):
    folder = make_model("Llama").folder
    settings = LoadSettings(dtype="float32", num_blocks=4, block_size=16, threads=5)
    executor = NativeExecutor.load(folder, settings, compiled=compiled)
    during = threads_here()
    asyncio.run(executor.close())
    assert len(during - threads_here()) >= 5


SHORT_OF_THREADS = """
import re, resource, sys
from pathlib import Path
from lmi_bench.engine.native_backend.executor import NativeExecutor, packed
from lmi_bench.engine.native_backend.executor import NativeForward
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.core.errors import EngineError

settings = LoadSettings(dtype="float32", num_blocks=4, block_size=16, threads=1)
opened = NativeExecutor.load(Path(sys.argv[1]), settings)._forward
status = Path("/proc/self/status").read_text()
taken_bytes = 1024 * int(re.search(r"VmSize:\\s+(\\d+) kB", status)[1])
resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + 2**29,) * 2)
try:
    opened._weights.model.threads = 20
    NativeForward(opened._library, opened._weights, opened.shape)
except EngineError as exc:
    print(exc)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as on Linux")
def test_a_thread_that_the_system_refuses_is_one_line_and_no_crash(make_model, compiled):
    """Stacks of 64 MiB in 512 MiB of address space: some of the threads run when one is refused."""
    script = (sys.executable, "-c", SHORT_OF_THREADS, str(make_model("Llama").folder))
    done = subprocess.run(
        ["sh", "-c", 'ulimit -s 65536 && exec "$0" "$@"', *script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "its 20 threads from the system: lower --threads" in done.stdout


def test_weights_that_are_to_be_quantized_are_left_to_torch(make_model, compiled):
    with pytest.raises(NativeUnavailableError, match="weights are to be quantized"):
        NativeExecutor.load(
            make_model("Llama").folder, LoadSettings(quantize=QuantizeSettings(scheme=Scheme.INT8)), compiled=compiled
        )
