"""Puts the bundled engine together: model, executor, scheduler settings, tokenizer.

With `back_end` the only module that reaches the back ends, inside the functions that need them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from lmi_bench.analysis.model.kv_cache import kv_bytes_per_token
from lmi_bench.cli.console import Reporter, note, progress
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import usable_cores
from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import MIB, bytes_to_gib
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.memory_budget import MemoryBudget
from lmi_bench.engine.quantization import NOT_QUANTIZED, QuantizedBytes
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.models.folder import folder_name, read_config, shape_of_folder
from lmi_bench.models.rope_scaling import parse_rope_scaling, rope_scaled_folder
from lmi_bench.models.shape import ModelShape
from lmi_bench.targets.back_ends import BackEnd, choose_back_end
from lmi_bench.targets.drafting import (
    NGRAM_DRAFT,
    check_same_vocabulary,
    drafter_for,
    speculation_facts,
    speculation_notes,
)
from lmi_bench.targets.idle_settings import idle_in_engine
from lmi_bench.targets.launching import launched_degree, refuse_to_follow
from lmi_bench.targets.parts import (
    EngineParts,
    close_all,
    config_facts,
    degree_of,
    replica_facts,
    replica_note,
    scheduler_config,
)
from lmi_bench.targets.placement import copies_a_device, first_device, gpu_count
from lmi_bench.targets.prepared_steps import step_facts, step_notes, step_settings
from lmi_bench.targets.quantizing import quantize_facts, quantize_notes, quantize_settings
from lmi_bench.targets.sagemaker_draft import refuse_sagemaker_draft
from lmi_bench.targets.tokenizers import DEMO_NAMES
from lmi_bench.targets.torch_threads import wait_briefly

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.load_settings import LoadSettings
    from lmi_bench.engine.torch_backend.static.build import PreparedSteps
    from lmi_bench.engine.torch_backend.static.check import StepDifference

_KEPT_MEMORY_FRAC: Final = 0.05  # of the machine's, which a cache that follows it leaves to others


class TorchNumbers(Executor, Protocol):
    """An executor of the torch back end with what it says of itself, over one rank or several."""

    model_shape: ModelShape
    num_blocks: int
    free_memory_bytes: int
    kv_cache_bytes: int
    kv_dtype: str
    weights_description: str
    weight_bytes: int
    quantized: QuantizedBytes | None
    prepared: PreparedSteps | None

    async def score(self, given: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """Log-probabilities of given tokens behind others."""
        ...

    async def compare_prepared(self) -> list[StepDifference]:
        """Prepared decode steps against eager ones."""
        ...

    async def time_products(self, rows: int) -> float | None:
        """Seconds of a decode step's matrix products."""
        ...


def open_torch_engine(
    model: str, settings: EngineSection, *, compile_into: Path | None = None
) -> EngineParts:
    """The bundled engine with a model folder or a demo model, loaded into memory.

    compile_into  folder for compiled steps; None: the user's cache

    Raises InputError where the model or a setting cannot be used, or torch is not installed.
    """
    if settings.draft_acceptance is not None:
        raise InputError(
            "--draft-acceptance is for a simulated engine; the bundled one measures how many "
            "drafted tokens hold"
        )
    refuse_to_follow()
    wait_briefly()
    if settings.tensor_parallel != 1:
        _start_ranks_early()
    try:
        from lmi_bench.engine.torch_backend.load_settings import (
            DEFAULT_BLOCK_SIZE,
            DEFAULT_MEMORY_SHARE,
            DEFAULT_MOST_CACHE_TOKENS,
            LoadSettings,
        )
    except ImportError as exc:
        raise InputError(
            f"the bundled engine needs {exc.name}: pip install 'lmi-bench[engine]', or use "
            "--target sim:INSTANCE or a URL"
        ) from exc
    refuse_sagemaker_draft(settings.draft, ["the bundled engine, which runs on this machine"])
    folder = model_folder(model, settings.rope_scaling)
    draft_folder = None
    copies = settings.replicas
    cores = settings.threads or usable_cores()
    gpus = gpu_count(settings)
    devices = cores if gpus is None else gpus
    degree = launched_degree(settings) or degree_of(settings, most=max(1, devices // copies))
    share = (settings.memory_share or DEFAULT_MEMORY_SHARE) / copies_a_device(copies, degree, gpus)
    if settings.draft is not None and settings.draft != NGRAM_DRAFT:
        draft_folder = model_folder(settings.draft)
        check_same_vocabulary(folder, draft_folder)
        bytes_a_token = [
            kv_bytes_per_token(shape_of_folder(place)) for place in (folder, draft_folder)
        ]
        share *= bytes_a_token[0] / sum(bytes_a_token)  # each caches the same tokens
    block_size = settings.block_size or DEFAULT_BLOCK_SIZE
    back_end = choose_back_end(
        settings,
        [folder] if draft_folder is None else [folder, draft_folder],
        degree=degree,
        block_size=block_size,
    )
    steps = step_settings(settings, back_end, out=compile_into)
    copy = _TorchCopy(
        folder,
        draft_folder,
        degree,
        back_end,
        LoadSettings(
            dtype=settings.dtype or "bfloat16",
            kv_dtype=settings.kv_dtype,
            num_blocks=settings.num_blocks,
            block_size=block_size,
            memory_share=share,
            most_cache_tokens=settings.max_batch_total_tokens or DEFAULT_MOST_CACHE_TOKENS,
            threads=max(1, cores // copies),
            # a draft has to draw as the model does, and a request alike on every copy
            sampling_seed=secrets.randbits(62),
            quantize=quantize_settings(settings),
            device=back_end.device,
            steps=steps,
        ),
        gpus,
    )
    if quantize_settings(settings) == NOT_QUANTIZED:
        _check_memory(folder, settings.dtype or "bfloat16", degree if gpus is not None else 1, gpus)
    executors, loaded, draft = copy.load(copies)
    notes = []
    if degree > 1 or copies > 1:
        notes.append(_layout_note(copies, degree, settings.router, cores, loaded))
    longest = loaded.model_shape.max_positions
    if draft is not None:
        longest = min(longest, draft.model_shape.max_positions)
        notes.append(
            f"draft {settings.draft}: {draft.model_shape.params_total:,} parameters, "
            f"{draft.weights_description}; KV cache {bytes_to_gib(draft.kv_cache_bytes):.2f} GiB"
        )
    named = model if model in DEMO_NAMES and settings.rope_scaling is None else folder_name(folder)
    shape = replace(loaded.model_shape, name=named)
    config = scheduler_config(
        settings,
        SchedulerConfig(
            num_blocks=loaded.num_blocks,
            block_size=loaded.block_size,
            max_model_len=min(longest, loaded.num_blocks * loaded.block_size),
            # a draft model reads the same blocks, and may see further back
            attention_window=None if draft else loaded.model_shape.attention_window,
        ),
    )
    if config.max_model_len > longest:
        raise InputError(
            f"--max-model-len {config.max_model_len:,}: {shape.name} "
            + (f"with the draft {settings.draft} " if draft_folder else "")
            + f"knows {longest:,} positions"
        )
    return EngineParts(
        executors=executors,
        config=config,
        shape=shape,
        tokenizer=Tokenizer.from_folder(folder),
        tensor_parallel=degree,
        router=settings.router,
        back_end_note=back_end.note,
        facts={
            "kind": "engine",
            "model": shape.name,
            **back_end.facts(),
            "tensor_parallel": degree,
            **replica_facts(settings),
            "weights": loaded.weights_description,
            "free_memory_bytes": loaded.free_memory_bytes,
            "kv_dtype": loaded.kv_dtype,
            "kv_cache_bytes": loaded.kv_cache_bytes,
            **quantize_facts(quantize_settings(settings), loaded.weight_bytes, loaded.quantized),
            **step_facts(loaded.prepared),
            "scheduler": config_facts(config),
            **speculation_facts(settings),
        },
        notes=(
            f"{shape.name}: {shape.params_total:,} parameters, {loaded.weights_description}",
            back_end.note,
            f"free memory after loading {bytes_to_gib(loaded.free_memory_bytes):.1f} GiB; KV "
            f"cache {bytes_to_gib(loaded.kv_cache_bytes):.2f} GiB in {config.num_blocks:,} "
            f"blocks of {config.block_size}, {config.cache_tokens:,} tokens"
            + (" a replica" if copies > 1 else ""),
            *quantize_notes(loaded.quantized),
            *step_notes(settings, loaded.prepared),
            *notes,
            *speculation_notes(settings),
            *idle_in_engine(settings),
        ),
        drafter=drafter_for(settings, shape, None if draft is None else draft.model_shape),
        score=loaded.score,
        quantized=loaded.quantized,
        compare=loaded.compare_prepared,
        time_products=loaded.time_products,
        memory_budget=(
            _memory_budget(settings, (loaded, draft), copies) if settings.follow_memory else None
        ),
    )


def _check_memory(folder: Path, dtype: str, devices: int, gpus: int | None) -> None:
    """CapacityError where the weights are larger than the memory of the devices that share them.

    A folder that holds them rounded is let pass.
    """
    import torch

    from lmi_bench.engine.torch_backend.memory import check_weights_fit
    from lmi_bench.engine.torch_backend.precision import torch_dtype

    if "quantization_config" in read_config(folder):
        return
    shape = shape_of_folder(folder)
    place = torch.device("cpu") if gpus is None else torch.device("cuda", 0)
    each = shape.params_total * torch_dtype(dtype).itemsize // devices
    check_weights_fit(folder.name, each, place)


def _memory_budget(
    settings: EngineSection, models: Sequence[TorchNumbers | None], copies: int
) -> MemoryBudget:
    """Of each copy: a share of what is free, and none of the last twentieth of the machine's.

    models  that keep the same tokens in caches of their own
    """
    import torch

    from lmi_bench.engine.torch_backend.memory import free_memory_bytes, memory_bytes

    if settings.device == "cuda" or settings.backend == "triton":
        raise InputError("--follow-memory: a GPU's cache is taken whole at the start")
    if settings.prefix_caching:
        raise InputError(
            "--follow-memory goes without --prefix-caching, whose idle blocks keep their memory"
        )
    place = torch.device("cpu")
    return MemoryBudget(
        free_bytes=lambda: free_memory_bytes(place) // copies,
        bytes_per_block=sum(
            model.kv_cache_bytes // model.num_blocks for model in models if model is not None
        ),
        keep_bytes=int(_KEPT_MEMORY_FRAC * memory_bytes()) // copies,
        told=note,
    )


def _start_ranks_early() -> None:
    """Let the ranks' server import torch while this process does."""
    from lmi_bench.engine.torch_backend.fork_server import fork_context

    fork_context()


class _TorchCopy:
    """How one copy of the model is loaded: on one device or over ranks, with a draft or without."""

    def __init__(
        self,
        folder: Path,
        draft_folder: Path | None,
        degree: int,
        back_end: BackEnd,
        settings: LoadSettings,
        gpus: int | None,
    ) -> None:
        self._folder = folder
        self._draft_folder = draft_folder
        self._degree = degree
        self._compiled = back_end.compiled
        self._settings = settings
        self._gpus = gpus

    def load(self, copies: int) -> tuple[tuple[Executor, ...], TorchNumbers, TorchNumbers | None]:
        """Every copy's executor, all with as many blocks as the first; the first copy's numbers
        and those of its draft."""
        executors: list[Executor] = []
        first: TorchNumbers | None = None
        first_draft: TorchNumbers | None = None
        try:
            with progress() as report:
                for number in range(copies):
                    title = "weights, MiB" + (f" (copy {number + 1})" if copies > 1 else "")
                    settings = replace(
                        self._settings,
                        first_device=first_device(number, self._degree, self._gpus),
                    )
                    if first is not None:
                        settings = replace(settings, num_blocks=first.num_blocks)
                    loaded, draft = self._load_one(
                        settings,
                        partial(_tell_bytes, report, title),
                        report,
                    )
                    executors.append(loaded if draft is None else DraftingExecutor(loaded, draft))
                    if first is None:
                        first, first_draft = loaded, draft
        except BaseException:
            asyncio.run(close_all(executors))
            raise
        assert first is not None
        return tuple(executors), first, first_draft

    def _load_one(
        self, settings: LoadSettings, report: Callable[[int, int], None], told: Reporter
    ) -> tuple[TorchNumbers, TorchNumbers | None]:
        from lmi_bench.engine.torch_backend.executor import TorchExecutor
        from lmi_bench.engine.torch_backend.parallel_executor import ParallelExecutor

        loaded: TorchNumbers
        if self._degree > 1:
            loaded = ParallelExecutor.load(
                self._folder,
                settings,
                tensor_parallel=self._degree,
                progress=report,
                told=told,
            )
        else:
            loaded = self._on_one_device(self._folder, settings, progress=report, told=told)
        if self._draft_folder is None:
            return loaded, None
        of_draft = replace(
            settings,
            num_blocks=loaded.num_blocks,
            quantize=NOT_QUANTIZED,
            steps=replace(  # a draft's steps run as they are
                settings.steps, compiled=False, artefact=None, captured=False, kernels=None
            ),
        )
        beside = loaded if isinstance(loaded, TorchExecutor) else None
        try:
            draft = self._on_one_device(
                self._draft_folder, of_draft, beside=beside, progress=report, told=told
            )
        except BaseException:
            asyncio.run(loaded.close())
            raise
        return loaded, draft

    def _on_one_device(self, folder: Path, settings: LoadSettings, **watched: Any) -> TorchNumbers:
        if self._compiled is not None:
            from lmi_bench.engine.native_backend.executor import NativeExecutor

            return NativeExecutor.load(folder, settings, compiled=self._compiled, **watched)
        from lmi_bench.engine.torch_backend.executor import TorchExecutor

        return TorchExecutor.load(folder, settings, **watched)


def _tell_bytes(report: Reporter, title: str, done_bytes: int, total_bytes: int) -> None:
    report(title, done_bytes / MIB, total_bytes / MIB)


def _layout_note(copies: int, degree: int, router: str, cores: int, loaded: TorchNumbers) -> str:
    parts = []
    if copies > 1:
        parts.append(replica_note(copies, router))
    if degree > 1:
        transport = str(getattr(loaded, "transport", "")).replace("_", " ")
        parts.append(f"{degree} ranks{' each' if copies > 1 else ''}, sums over {transport}")
    note = "; ".join(parts)
    if copies * degree > cores:
        note += f" (warning: {copies * degree} processes share {cores} cores)"
    return note


def model_folder(model: str, rope_scaling: str | None = None) -> Path:
    """A model's folder, or one like it with stretched positions.

    A demo model is made first where it is not there yet. Raises InputError for a model that is
    neither.
    """
    from lmi_bench.engine.torch_backend.demo import DEMO_MODELS, ensure_demo_model

    folder = None
    if model in DEMO_MODELS:
        folder = ensure_demo_model(model)
    elif Path(model).is_dir():
        folder = Path(model)
    if folder is not None:
        if rope_scaling is None:
            return folder
        return rope_scaled_folder(folder, parse_rope_scaling(rope_scaling))
    raise InputError(
        f"model {model!r} is neither a folder nor a demo model ({', '.join(DEMO_MODELS)}): "
        "give the path of a Hugging Face folder (config.json, *.safetensors, tokenizer.json)"
    )


def measure_layer_errors(model: str, settings: EngineSection) -> dict[str, float]:
    """Relative error of each matrix's outputs after rounding, by its name in the checkpoint."""
    from lmi_bench.engine.torch_backend.quantization.layer_errors import layer_errors

    with progress() as report:
        return layer_errors(
            model_folder(model),
            quantize_settings(settings),
            dtype=settings.dtype or "bfloat16",
            told=report,
        )


def save_quantized(model: str, settings: EngineSection, out: Path) -> int:
    """Write a model with rounded weights as a folder of its own; returns bytes of its tensors."""
    from lmi_bench.engine.torch_backend.quantization.export import export_quantized

    with progress() as report:
        return export_quantized(
            model_folder(model),
            out,
            quantize_settings(settings),
            dtype=settings.dtype or "bfloat16",
            told=report,
        )


def time_all_reduces(
    ranks: int, transport: str, sizes_bytes: Sequence[int], *, rounds: int
) -> list[float]:
    """Seconds of one all-reduce over processes of this machine, for each size of the array.

    Raises InputError where torch is not installed or the transport does not work here.
    """
    _start_ranks_early()
    try:
        from lmi_bench.engine.torch_backend.measure_collectives import measure_all_reduces
    except ImportError as exc:
        raise InputError(f"the ranks need {exc.name}: pip install 'lmi-bench[engine]'") from exc
    return measure_all_reduces(ranks, transport, sizes_bytes, rounds=rounds)
