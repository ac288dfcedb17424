"""Log-probabilities of fixed tokens on a model folder, whatever loads it."""

from __future__ import annotations

import asyncio

import torch

from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings

TOKENS = tuple(range(3, 60))


def scores(folder, *, load=TorchExecutor.load, **options):
    """Of TOKENS behind the first of them, float32. options: fields of LoadSettings"""

    async def run():
        executor = load(folder, LoadSettings(dtype="float32", num_blocks=4, threads=1, **options))
        try:
            return await executor.score(TOKENS[:1], TOKENS[1:])
        finally:
            await executor.close()

    return torch.tensor(asyncio.run(run()))
