"""Ranks started by a launcher: its variables, and two processes that only torch.distributed
connects."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.launched import Launch, launch_of
from tests.engine.torch_backend.test_runner import PROMPT

ROOT = Path(__file__).parents[3]
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
PROCESS = """
import asyncio, json, os, sys
from pathlib import Path
from lmi_bench.engine.torch_backend.launched import follow, launch_of
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.parallel_executor import ParallelExecutor
from tests.engine.torch_backend.test_runner import PROMPT, LAST_SAMPLED, entry, step

launch = launch_of(os.environ)
if launch.rank:
    follow(launch, "cpu", threads=1)
    sys.exit()
executor = ParallelExecutor.load(
    Path(sys.argv[1]),
    LoadSettings(dtype="float32", num_blocks=8, block_size=4),
    tensor_parallel=2,
)

async def run():
    got = list((await executor.execute(step(entry(1, PROMPT, 0, (3, 5, 1)))))[0].token_ids)
    for position in range(9, 12):
        got += (await executor.execute(step(entry(1, (LAST_SAMPLED,), position))))[0].token_ids
    await executor.close()
    print(json.dumps([executor.transport.value, executor.weight_bytes, got]))

asyncio.run(run())
"""

IDLE = """
import asyncio, os, sys
from pathlib import Path
from lmi_bench.engine.torch_backend.launched import follow, launch_of
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.parallel_executor import ParallelExecutor
from lmi_bench.core.errors import EngineError

launch = launch_of(os.environ)
if launch.rank:
    try:
        follow(launch, "cpu", threads=1)
    except EngineError as exc:
        print(exc)
    sys.exit()
executor = ParallelExecutor.load(
    Path(sys.argv[1]),
    LoadSettings(dtype="float32", num_blocks=8, block_size=4),
    tensor_parallel=2,
)

async def run():
    print("loaded", flush=True)
    print(await executor.lost())
    await executor.close()

asyncio.run(run())
"""


def test_torchruns_variables_say_which_rank_this_is():
    assert launch_of(TORCHRUN) == Launch(3, 4, 1, 2)
    assert launch_of({}) is None
    assert launch_of(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(InputError, match="RANK=first"):
        launch_of(TORCHRUN | {"RANK": "first"})


@contextlib.contextmanager
def launched(script: str, folder: Path) -> Iterator[tuple[subprocess.Popen, subprocess.Popen]]:
    """Ranks 0 and 1 of a script, killed at the end if they still run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in (0, 1):
        environ = os.environ | {
            **TORCHRUN,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", script, str(folder)]
        processes.append(
            subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        )
    leader, follower = processes
    try:
        yield leader, follower
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_launched_ranks_give_the_tokens_of_one_device(llama):
    with launched(PROCESS, llama.folder) as (leader, follower):
        printed, _ = leader.communicate(timeout=60)
        assert (leader.returncode, follower.wait(timeout=20)) == (0, 0)
    transport, _, got = json.loads(printed.splitlines()[-1])
    assert transport == "gloo"
    assert got == llama.greedy(PROMPT, 4).token_ids


@pytest.mark.parametrize("lost", [0, 1])
def test_an_idle_rank_hears_that_another_one_has_ended(llama, lost):
    """Nothing runs, so no sum fails: rank 0 would serve on, and rank 1 wait for it."""
    with launched(IDLE, llama.folder) as ranks:
        assert "loaded\n" in iter(ranks[0].stdout.readline, "")
        ranks[lost].kill()
        printed, _ = ranks[1 - lost].communicate(timeout=20)
    assert f"rank {lost} of 2 has ended or its host cannot be reached" in printed
