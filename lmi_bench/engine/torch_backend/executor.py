"""The executor that really computes: a model on one device, driven from a thread of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from lmi_bench.engine.quantization import NOT_QUANTIZED, QuantizedBytes, QuantizeSettings
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.torch_backend.forward import Forward, TorchForward
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.memory import blocks_that_fit, free_memory_bytes
from lmi_bench.engine.torch_backend.models.build import build_model
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.precision import Precision, choose_precision, torch_dtype
from lmi_bench.engine.torch_backend.quantization.calibration import Told
from lmi_bench.engine.torch_backend.quantization.prepare import prepare
from lmi_bench.engine.torch_backend.quantization.product_times import product_time_s
from lmi_bench.engine.torch_backend.runner import ModelRunner
from lmi_bench.engine.torch_backend.static.build import (
    NOTHING_PREPARED,
    SPARE_BLOCKS,
    PreparedSteps,
    StepSettings,
    with_prepared_steps,
)
from lmi_bench.engine.torch_backend.static.check import StepDifference, compare_steps
from lmi_bench.engine.torch_backend.static.forward import StaticForward
from lmi_bench.engine.torch_backend.weights import Progress
from lmi_bench.errors import EngineError, InputError, LmiBenchError
from lmi_bench.hf_config import spec_from_hf_config
from lmi_bench.host import usable_cores
from lmi_bench.model_folder import check_loadable, read_config
from lmi_bench.model_shape import ModelShape

DEFAULT_BLOCK_SIZE: Final = 64
"""Tokens of a page: long enough that the matrix product over one is worth its call."""

DEFAULT_MEMORY_SHARE: Final = 0.5
"""Share of the free memory that the cache may take: a machine's CPU memory is rarely ours alone."""

DEFAULT_MOST_CACHE_TOKENS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading leaves: the runner and the numbers worth showing."""

    runner: ModelRunner
    precision: Precision
    num_blocks: int
    free_memory_bytes: int
    kv_bytes_per_block: int
    kv_cache_bytes: int
    kv_dtype: str
    weight_bytes: int
    quantized: QuantizedBytes | None
    prepared: PreparedSteps | None = None
    static: StaticForward | None = None
    eager: Forward | None = None
    model: Decoder | None = None


class TorchExecutor:
    """Runs steps of one model; see `load`. Its numbers:

    model_shape         the model, named after its folder
    num_blocks          cache blocks of `block_size` tokens
    free_memory_bytes   seen after the weights were loaded, before the cache was taken
    kv_bytes_per_block  keys and values of one block, all layers
    kv_cache_bytes      of all blocks
    kv_dtype            number format of the cache
    weights_description formats of weights and arithmetic, for a start-up line
    weight_bytes        of matrices, embeddings and head as they are held
    quantized           what quantizing did to the matrices; None where they keep their floats
    prepared            what preparing decode steps came to; None where none were
    """

    def __init__(
        self,
        loaded: Loaded,
        shape: ModelShape,
        block_size: int,
        worker: ThreadPoolExecutor,
        *,
        owns_worker: bool = True,
    ) -> None:
        self._runner = loaded.runner
        self._worker = worker
        self._owns_worker = owns_worker
        self._block_size = block_size
        self.model_shape = shape
        self.num_blocks = loaded.num_blocks
        self.free_memory_bytes = loaded.free_memory_bytes
        self.kv_bytes_per_block = loaded.kv_bytes_per_block
        self.kv_cache_bytes = loaded.kv_cache_bytes
        self.kv_dtype = loaded.kv_dtype
        self.weights_description = str(loaded.precision)
        self.weight_bytes = loaded.weight_bytes
        self.quantized = loaded.quantized
        self.prepared = loaded.prepared
        self._static = loaded.static
        self._eager = loaded.eager
        self._model = loaded.model

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
        num_blocks: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        memory_share: float = DEFAULT_MEMORY_SHARE,
        most_cache_tokens: int = DEFAULT_MOST_CACHE_TOKENS,
        threads: int | None = None,
        device: str = "cpu",
        sampling_seed: int | None = None,
        beside: TorchExecutor | None = None,
        progress: Progress | None = None,
        quantize: QuantizeSettings = NOT_QUANTIZED,
        told: Told | None = None,
        steps: StepSettings = NOTHING_PREPARED,
    ) -> TorchExecutor:
        """Load a Hugging Face folder (config.json and safetensors) and take memory for its cache.

        dtype              "float32" or "bfloat16": weights, and cache unless `kv_dtype` differs
        kv_dtype           "float32" or "bfloat16": cached keys and values; None: as the weights
        num_blocks         cache blocks; None: as `memory_share` (0 to 1) of the memory that is
                           free after loading allows, at most `most_cache_tokens` tokens
        threads            CPU threads of a step; None: the cores that this process may use
        sampling_seed      of requests without a seed; None: another one at each start
        beside             share the thread of this executor, whose close ends it: two pools of
                           threads would hinder each other
        progress           told (bytes read, bytes of all files) while the weights are loaded,
                           in the worker's thread
        quantize           how weights are rounded as they are loaded
        told               told how far calibration or compiling has come, in the worker's thread
        steps              which decode steps are compiled or captured at start

        Raises InputError for a folder or a setting that cannot be used, CapacityError where no
        block fits.
        """
        if block_size < 1:
            raise InputError(f"block_size must be at least 1, got {block_size}")
        if num_blocks is not None and num_blocks < 1:
            raise InputError(f"num_blocks must be at least 1, got {num_blocks}")
        if threads is not None and threads < 1:
            raise InputError(f"threads must be at least 1, got {threads}")
        config = read_config(folder)
        check_loadable(folder, config)
        name = folder.resolve().name
        spec = spec_from_hf_config(name, config)
        shape = spec.shape(name)
        cache_dtype = None if kv_dtype is None else torch_dtype(kv_dtype)

        def load_all() -> Loaded:
            place = torch.device(device)
            precision = choose_precision(
                dtype,
                place,
                parameters=shape.params_total,
                free_bytes=free_memory_bytes(place),
            )
            plan = prepare(
                folder, config, spec, quantize, degree=1, dtype=dtype, device=place, told=told
            )
            model = build_model(folder, spec, precision, place, progress, plan=plan)
            layout = KvLayoutShape(
                num_layers=shape.num_layers,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                block_size=block_size,
                dtype=cache_dtype or precision.stored,
            )
            free = free_memory_bytes(place)
            blocks = num_blocks or blocks_that_fit(
                free,
                memory_share,
                layout.bytes_per_block,
                most=max(1, most_cache_tokens // block_size),
            )
            cache = KvCache(layout, blocks + (SPARE_BLOCKS if steps.wanted else 0), place)
            seed = secrets.randbits(62) if sampling_seed is None else sampling_seed
            eager = TorchForward(model, cache, precision, num_blocks=blocks)
            forward: Forward = eager
            prepared = None
            if steps.wanted:
                forward, prepared = with_prepared_steps(
                    eager,
                    model,
                    cache,
                    precision,
                    steps,
                    quantize=weights_name(config, quantize),
                    told=told,
                )
            runner = ModelRunner(forward, sampling_seed=seed)
            return Loaded(
                runner,
                precision,
                blocks,
                free,
                layout.bytes_per_block,
                cache.nbytes,
                str(layout.dtype).removeprefix("torch."),
                model.held_bytes,
                model.quantized,
                prepared,
                forward if isinstance(forward, StaticForward) else None,
                eager,
                model,
            )

        # OpenMP keeps a pool of threads for each thread that computes: one worker does it all
        if beside is not None:
            loaded = beside._worker.submit(load_all).result()
            return cls(loaded, shape, block_size, beside._worker, owns_worker=False)
        worker = ThreadPoolExecutor(
            1,
            thread_name_prefix="lmi-bench-torch",
            initializer=torch.set_num_threads,
            initargs=(threads or usable_cores(),),
        )
        try:
            loaded = worker.submit(load_all).result()
        except BaseException:
            worker.shutdown(wait=True)
            raise
        return cls(loaded, shape, block_size, worker)

    @property
    def block_size(self) -> int:
        """Tokens of one cache block."""
        return self._block_size

    @property
    def max_in_flight(self) -> int:
        """One: on a CPU, planning takes less than a hundredth of a step."""
        return 1

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Run one step in the worker thread. Raises EngineError when it fails."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._worker, self._runner.run, batch)
        except LmiBenchError:
            raise
        except RuntimeError as exc:  # what torch raises, out of memory included
            raise EngineError(f"step {batch.step_id} failed: {exc}") from exc

    async def score(self, given: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """Natural log-probability of each token of `continuation` behind `given` and each other.

        Only while the executor holds no sequence: raises EngineError otherwise.
        """
        loop = asyncio.get_running_loop()
        token_ids = [*given, *continuation]
        return await loop.run_in_executor(self._worker, self._runner.score, token_ids, len(given))

    async def compare_prepared(self) -> list[StepDifference]:
        """Prepared steps against the same steps run as they are, one for each shape; none where
        none are prepared. Only while the executor holds no sequence."""
        if self._static is None or self._eager is None:
            return []
        compare = partial(compare_steps, self._static, self._eager)
        return await asyncio.get_running_loop().run_in_executor(self._worker, compare)

    async def time_products(self, rows: int) -> float | None:
        """Seconds of a decode step's matrix products for so many sequences; None where another
        back end has the weights. Only while no step runs."""
        if self._model is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, product_time_s, self._model, rows)

    @property
    def step_counts(self) -> tuple[int, int] | None:
        """Steps that ran prepared, and those that did not; None where none are prepared."""
        if self._static is None:
            return None
        return self._static.static_steps, self._static.other_steps

    async def close(self) -> None:
        """Wait for the step that runs, then end the worker thread if it is this one's own."""
        if self._owns_worker:
            await asyncio.to_thread(self._worker.shutdown)


def weights_name(config: Mapping[str, Any], quantize: QuantizeSettings) -> str:
    """How the weights are rounded: as asked for, or as the folder stores them."""
    stored = config.get("quantization_config") or {}
    if quantize != NOT_QUANTIZED or not stored:
        return str(quantize)
    return f"stored {stored.get('quant_method')} {stored.get('bits', '')}".strip()
