"""A model split over processes gives what the whole model gives, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from lmi_bench.core.errors import CapacityError, EngineError, InputError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.torch_backend.collectives import Transport
from lmi_bench.engine.torch_backend.executor import ParallelExecutor, TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.loading import RankCheckpoint
from lmi_bench.engine.torch_backend.rank import RankGroup, RankWorker, is_closed
from lmi_bench.engine.torch_backend.weights import read_model
from tests.engine.torch_backend.parity import assert_equal_but_for_near_ties, generate, random_requests

FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2}
MODELS = {
    "MHA": ("Llama", {}, 2),
    "GQA": ("Llama", {"num_key_value_heads": 2}, 2),
    "more ranks than KV heads": ("Llama", {"num_key_value_heads": 2}, 4),
    "MQA, tied, biases": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "initializer_range": 0.1,
        },
        2,
    ),
    "head norms": ("Qwen3", {}, 2),
    "experts": ("Mixtral", {}, 2),
    "fused projections": ("Falcon", FALCON_40B, 2),
    "fused rows": ("Phi3", {}, 2),
    "sinks, biases of experts": ("GptOss", {}, 2),
    "latent attention": ("DeepseekV3", {}, 2),
    "shared expert": ("Qwen2Moe", {}, 2),
    "a part of a head rotates": ("Glm4Moe", {}, 2),
    "four norms and caps": ("Gemma2", {}, 2),
    "rotary settings by layer": ("Gemma3", {}, 2),
}


CHUNKS_WITHOUT_A_TOKEN = {"max_rolling_batch_prefill_tokens": 8}
"""Longer prompts take several steps, of which all but the last give no token: there the ranks join
logits of no row."""


def split(degree, **options):
    """Loads as TorchExecutor does, over several ranks."""
    return partial(ParallelExecutor.load, tensor_parallel=degree, **options)


@pytest.mark.parametrize(("family", "changes", "degree"), MODELS.values(), ids=MODELS)
def test_ranks_together_give_the_tokens_of_the_whole_model(make_model, family, changes, degree):
    model = make_model(family, **changes)
    requests = random_requests(1, 6, longest_output=12)
    outputs, _ = asyncio.run(generate(model.folder, requests, load=split(degree), **CHUNKS_WITHOUT_A_TOKEN))
    assert_equal_but_for_near_ties(model, requests, outputs)


EIGHT_OVER_FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4}
DEALT = {
    "a KV head for each query head": ("Llama", EIGHT_OVER_FOUR, 2, "replicated-heads"),
    "a rank of padding alone": ("Llama", {"num_key_value_heads": 2}, 3, "replicated-heads"),
    "padded queries, features and KV heads": (
        *("Llama", {"num_key_value_heads": 1, "intermediate_size": 100}),
        *(3, "replicated-heads"),
    ),
    "biases without grouping": (
        *("Llama", {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.1}),
        *(3, "shard-over-heads"),
    ),
    "head norms": ("Qwen3", {}, 3, "replicated-heads"),
    "experts": ("Mixtral", {}, 2, "replicated-heads"),
}


@pytest.mark.parametrize(("family", "changes", "degree", "strategy"), DEALT.values(), ids=DEALT)
def test_heads_dealt_out_by_neuronx_rules_change_no_token(make_model, family, changes, degree, strategy):
    model = make_model(family, **changes)
    requests = random_requests(1, 4, longest_output=8)

    def load(folder, settings):
        dealt = replace(settings, group_query_attention=strategy)
        return ParallelExecutor.load(folder, dealt, tensor_parallel=degree)

    outputs, _ = asyncio.run(generate(model.folder, requests, load=load))
    assert_equal_but_for_near_ties(model, requests, outputs)


def test_copied_kv_heads_take_their_memory_on_every_rank(make_llama):
    """Four KV heads for eight query heads: copied for each query head, the cache doubles."""
    folder = make_llama(**EIGHT_OVER_FOUR).folder

    def cache_bytes(strategy):
        settings = LoadSettings(num_blocks=8, group_query_attention=strategy)
        executor = ParallelExecutor.load(folder, settings, tensor_parallel=2)
        asyncio.run(executor.close())
        return executor.kv_cache_bytes

    assert cache_bytes("replicated-heads") == 2 * cache_bytes("shard-over-heads")


def test_padding_is_for_separate_matrices(make_model):
    falcon = make_model("Falcon", **FALCON_40B).folder
    settings = LoadSettings(group_query_attention="replicated-heads")
    with pytest.raises(CapacityError, match="separate queries"):
        ParallelExecutor.load(falcon, settings, tensor_parallel=2)


def test_chunks_beside_decoding_and_preemption_change_no_token_on_ranks(make_llama):
    model = make_llama(num_key_value_heads=2)
    requests = random_requests(3, 10, longest_prompt=24, longest_output=30)
    outputs, stats = asyncio.run(
        generate(model.folder, requests, load=split(2), num_blocks=30, block_size=4, chunked_prefill=True)
    )
    assert stats.preemptions > 0
    assert_equal_but_for_near_ties(model, requests, outputs)


def test_gloo_carries_the_same_sums(make_llama):
    model = make_llama()
    requests = random_requests(4, 4)
    outputs, _ = asyncio.run(
        generate(model.folder, requests, load=split(2, transport=Transport.GLOO), **CHUNKS_WITHOUT_A_TOKEN)
    )
    assert_equal_but_for_near_ties(model, requests, outputs)


async def logprobs_and_draws(executor):
    """Log-probabilities of greedy tokens, and tokens drawn with a seed."""
    config = SchedulerConfig(num_blocks=executor.num_blocks, block_size=executor.block_size)
    async with AsyncEngine(Scheduler(config), executor) as engine:
        greedy = engine.submit(range(5, 45), SamplingParams(max_new_tokens=8, logprobs=True))
        drawn = engine.submit(range(50, 60), SamplingParams(max_new_tokens=12, temperature=0.8, seed=3))
        await greedy.wait()
        await drawn.wait()
    return (
        [x for event in greedy.events for x in event.logprobs],
        [token for event in drawn.events for token in event.token_ids],
    )


def test_log_probabilities_and_draws_are_those_of_one_device(llama):
    options = LoadSettings(dtype="float32", num_blocks=40, block_size=8, threads=1)
    whole = asyncio.run(logprobs_and_draws(TorchExecutor.load(llama.folder, options)))
    parts = asyncio.run(logprobs_and_draws(split(2)(llama.folder, options)))
    assert parts[0] == pytest.approx(whole[0], abs=1e-4)
    assert parts[1] == whole[1]


def test_given_tokens_are_scored_as_on_one_device(llama):
    async def score(executor):
        values = await executor.score(range(5, 12), range(20, 24))
        await executor.close()
        return values

    options = LoadSettings(dtype="float32", num_blocks=4, block_size=8, threads=1)
    whole = asyncio.run(score(TorchExecutor.load(llama.folder, options)))
    assert asyncio.run(score(split(2)(llama.folder, options))) == pytest.approx(whole, abs=1e-4)


def test_each_rank_keeps_its_share_of_the_cache(make_llama):
    """4 KV heads: half of them on each of two ranks. 2 KV heads on 4 ranks: each is kept twice."""
    options = LoadSettings(dtype="float32", num_blocks=10, block_size=8, threads=1)
    folder = make_llama().folder
    whole = TorchExecutor.load(folder, options)
    asyncio.run(whole.close())
    halves = split(2)(folder, options)
    asyncio.run(halves.close())
    shared = split(4)(make_llama(num_key_value_heads=2).folder, options)
    asyncio.run(shared.close())
    assert halves.kv_cache_bytes == whole.kv_cache_bytes == shared.kv_cache_bytes
    per_block = 2 * 2 * 4 * 16 * 8 * 4  # k and v, layers, heads, dim, tokens, bytes
    assert halves.kv_cache_bytes == 10 * per_block


def shared_memory_names():
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def process_ids_of(executor):
    return tuple(process.pid for process in executor._ranks._processes)


def wait_until_gone(process_ids, limit_s=30.0):
    """Whether all processes end; a killed one stays as a zombie until its parent asks."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if not any(Path(f"/proc/{pid}/stat").exists() for pid in process_ids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_closing_leaves_no_process_and_no_shared_memory(llama):
    before = shared_memory_names()
    executor = split(2)(llama.folder, LoadSettings(dtype="float32", num_blocks=4, threads=1))
    process_ids = process_ids_of(executor)
    assert all(Path(f"/proc/{pid}/stat").exists() for pid in process_ids)
    assert shared_memory_names() == before  # its name is gone as soon as all ranks have it
    asyncio.run(executor.close())
    assert wait_until_gone(process_ids)


async def killed_while_generating(folder, rank):
    executor = split(2)(folder, LoadSettings(dtype="float32", num_blocks=100, block_size=8, threads=1))
    process_ids = process_ids_of(executor)
    config = SchedulerConfig(num_blocks=100, block_size=8, max_model_len=500)
    async with AsyncEngine(Scheduler(config), executor) as engine:
        running = [engine.submit(range(5, 15), SamplingParams(max_new_tokens=480, ignore_eos=True)) for _ in range(2)]
        async for _ in running[0]:
            os.kill(process_ids[rank], signal.SIGKILL)
            break
        with pytest.raises(EngineError, match=f"rank {rank} of 2 .*killed by signal 9"):
            await running[1].wait()
        with pytest.raises(EngineError, match=f"rank {rank} of 2"):
            engine.submit(range(5), SamplingParams())
    return process_ids


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_requests_with_its_name(llama, rank):
    process_ids = asyncio.run(killed_while_generating(llama.folder, rank))
    assert wait_until_gone(process_ids)


class ReadOnce:
    """A process whose exit code comes once, over a pipe: who joins beside another finds it gone,
    as 5 of 150 killed processes of multiprocessing were seen to."""

    exitcode = None

    def __init__(self):
        self.joining = 0

    def join(self, timeout):
        known = self.exitcode is not None
        self.joining += 1
        alone = self.joining == 1
        time.sleep(0.005)
        self.joining -= 1
        if not known:
            self.exitcode = -9 if alone else 255


def test_whoever_asks_at_once_how_a_rank_ended_is_told_the_same():
    """The step that waits for it and the watcher between steps do, in threads of their own."""
    group, process = RankGroup.__new__(RankGroup), ReadOnce()
    group._one_at_a_time = threading.Lock()
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(group._exit_code, [process] * 4, [time.monotonic() + 5] * 4))
    assert told == [-9] * 4


def test_a_rank_that_is_killed_while_nothing_runs_ends_the_engine_too(llama):
    async def main():
        executor = split(2)(llama.folder, LoadSettings(dtype="float32", num_blocks=8, block_size=8, threads=1))
        config = SchedulerConfig(num_blocks=8, block_size=8, max_model_len=60)
        async with AsyncEngine(Scheduler(config), executor) as engine:
            await engine.submit(range(5, 9), SamplingParams(max_new_tokens=3)).wait()
            os.kill(process_ids_of(executor)[1], signal.SIGKILL)
            async with asyncio.timeout(120):
                error = await engine.failed()
            assert "rank 1 of 2" in str(error)
            assert "killed by signal 9" in str(error)
            with pytest.raises(EngineError, match="rank 1 of 2"):
                engine.submit(range(5), SamplingParams())
        return process_ids_of(executor)

    assert wait_until_gone(asyncio.run(main()))


def test_the_next_request_does_not_end_a_rank_that_is_still_in_the_step_before():
    """Rank 0 answers as soon as every rank has brought its part; another may not have seen it yet.
    Here rank 1 has the next request before rank 0 has even begun."""
    group = RankGroup(2, Transport.SHARED_MEMORY, threads=1)
    sums = partial(RankWorker.time_all_reduces, sizes_bytes=[64], calls=[1], rounds=1, device="cpu")
    try:
        for _ in range(2):
            group._send(1, pickle.dumps((sums, True)))
        assert not group._connections[1].poll(0.2)  # an answer would be that it was aborted
        for _ in range(2):
            group._send(0, pickle.dumps((sums, False)))
        for _ in range(2):
            assert group._receive([1], None)[0][0] > 0
    finally:
        group.close()


WAITS_AND_TELLS = """
import pickle, sys, time
from functools import partial
from lmi_bench.engine.torch_backend.collectives import Transport
from lmi_bench.engine.torch_backend.rank import RankGroup, RankWorker
group = RankGroup(2, Transport.SHARED_MEMORY, threads=1)
sums = partial(RankWorker.time_all_reduces, sizes_bytes=[64], calls=[1], rounds=1, device="cpu")
for _ in range(2):
    group._send(1, pickle.dumps((sums, True)))
print(*(process.pid for process in group._processes), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ranks_end_with_their_parent_even_inside_a_step_with_the_next_request_unread():
    with subprocess.Popen([sys.executable, "-c", WAITS_AND_TELLS], stdout=subprocess.PIPE) as parent:
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(process_ids) == 2
    assert wait_until_gone(process_ids)


def test_a_closed_pipe_is_seen_behind_messages_that_nobody_has_read():
    ours, theirs = Pipe()
    ours.send("a request")
    assert not is_closed(theirs)
    ours.close()
    assert is_closed(theirs)
    assert theirs.recv() == "a request"


def test_an_error_on_a_rank_is_told_with_its_name():
    group = RankGroup(2, Transport.SHARED_MEMORY, threads=1)
    try:
        with pytest.raises(EngineError, match="rank 0 of 2: no cache is allocated"):
            group.ask_first(partial(RankWorker.run, batch=None))
    finally:
        group.close()
    with pytest.raises(EngineError, match="closed"):
        group.ask_first(partial(RankWorker.run, batch=None))


@pytest.mark.parametrize(
    ("family", "changes", "degree", "words"),
    [
        ("Llama", {}, 3, "4 query heads .* 3 devices"),
        ("Llama", {"intermediate_size": 97}, 2, "97 features"),
        ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, 2, "3 KV"),
        ("Falcon", {"num_attention_heads": 71, "hidden_size": 71 * 8}, 2, "71 query heads"),
        ("Falcon", {}, 2, "1 KV heads cannot be split over 2"),
    ],
)
def test_a_degree_that_the_model_does_not_allow_is_refused_with_numbers(make_model, family, changes, degree, words):
    folder = make_model(family, **changes).folder
    with pytest.raises(CapacityError, match=words):
        split(degree)(folder, LoadSettings())


def test_a_checkpoint_of_another_config_is_refused_on_ranks(make_llama, tmp_path):
    """The MLP is half of what the config says, which is what each of two ranks should hold."""
    folder = shutil.copytree(make_llama().folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    with pytest.raises(InputError, match="belongs to another config"):
        split(2)(folder, LoadSettings(dtype="float32", num_blocks=2))


@pytest.mark.parametrize(("vocab", "degree"), [(211, 2), (8, 4), (5, 4), (3, 4)])
def test_the_vocabulary_parts_cover_every_id_once(make_llama, tmp_path, vocab, degree):
    spec = read_model(make_llama().folder).spec
    table = torch.arange(1.0, 2 * vocab + 1).view(vocab, 2)
    save_file({"table": table}, tmp_path / "model.safetensors")
    parts = []
    for rank in range(degree):
        with RankCheckpoint(tmp_path, spec, SimpleNamespace(rank=rank, degree=degree)) as part:
            parts.append(part.vocabulary_rows("table", vocab, 2))
    assert {len(part) for part in parts} == {-(-vocab // degree)}
    whole = torch.cat(parts)
    assert torch.equal(whole[:vocab], table)
    assert not whole[vocab:].any()
