"""Assembles the bundled engine in this process: model, executor, scheduler settings, tokenizer.

Like `loading` and `back_ends` it imports the step back ends inside the functions that need them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmi_bench.analysis.model.memory import kv_bytes_per_token
from lmi_bench.core.clock import alarm
from lmi_bench.core.errors import EXIT_FAILED, InputError, installed
from lmi_bench.core.host import usable_cores
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import EngineSection, Scenario
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.loadgen.prompts.prompts import TokenIds
from lmi_bench.models import folder as folders
from lmi_bench.targets import drafting, loading, quantizing
from lmi_bench.targets import parts as engine_parts
from lmi_bench.targets.applies import idle_in_engine, refuse_impossible
from lmi_bench.targets.back_ends import choose_back_end, step_facts, step_notes, step_settings
from lmi_bench.targets.bench import Bench
from lmi_bench.targets.prompts import DEMO_NAMES

if TYPE_CHECKING:
    from lmi_bench.engine.chrome_trace import ChromeTrace
    from lmi_bench.engine.torch_backend.load_settings import LoadSettings
    from lmi_bench.targets.parts import LoadedModel

SPIN_COUNT: Final = "3000"
"""Iterations of libgomp's wait loop, about 0.1 to 0.2 ms on x86. Its default of 300,000 is 10 to
20 ms: threads then waste the time slice of the thread that they wait for if it has lost its core to
another process. Two threads, one core busy: demo-15m, 32 sequences, 88 ms a step with the default,
44 with this."""


def wait_briefly() -> None:
    """Limit how long torch's threads spin, unless the user has chosen; call before torch loads."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def loading_deadline(model: str, limit_s: float | None) -> AbstractContextManager[None]:
    """End the process with one line if the block takes longer than `limit_s`.

    The process exits at once because the threads that read weights cannot be interrupted. Rank
    processes end with it, since their pipes close.
    """
    if limit_s is None:
        return nullcontext()
    if limit_s <= 0:
        raise InputError(f"model_loading_timeout must be above 0 seconds, got {limit_s:g}")

    def give_up() -> None:
        text = f"error: {model} was not loaded within {limit_s:g} s (model_loading_timeout): raise "
        sys.stderr.write(text + "it, or use faster storage\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    return alarm(limit_s, give_up)


def engine_bench(scenario: Scenario, listener: Listener, trace: ChromeTrace | None) -> Bench:
    """The bundled engine with the scenario's model, loaded and ready to be measured."""
    parts = open_torch_engine(scenario.model, scenario.engine, listener)
    if parts.quantized is not None and parts.quantized.emulated:
        asyncio.run(engine_parts.close_all(parts.executors))
        raise InputError(
            f"{parts.quantized.scheme} is only emulated on this device, so that its speed means "
            "nothing and is not measured; `lmi-bench generate` and `optimize` show its text, "
            "size and error"
        )
    tokenizer = parts.tokenizer
    assert tokenizer is not None  # a torch engine has read it from its folder
    special = max((0, *(eos + 1 for eos in tokenizer.eos_token_ids)))
    ids = TokenIds(tokenizer.vocab_size, first_id=special if special < 1000 else 0)
    return parts.bench(scenario, ids, trace)


def open_torch_engine(
    model: str, settings: EngineSection, listener: Listener = SILENT, *, compile_into: Path | None = None
) -> engine_parts.EngineParts:
    """The bundled engine with a model folder or a demo model, loaded into memory.

    compile_into  folder for compiled steps; None: the user's cache
    Raises InputError if the model or a setting cannot be used, or torch is not installed.
    """
    refuse_impossible("bundled", settings)
    wait_briefly()
    if settings.tensor_parallel not in (None, 1):
        loading.start_ranks_early()
    with installed("the bundled engine", ", or use --target sim:INSTANCE or a URL"):
        import lmi_bench.engine.torch_backend.load_settings  # noqa: F401
    drafting.refuse_sagemaker_draft(settings.draft, ["the bundled engine, which runs on this machine"])
    plan = _plan(model, settings, listener)
    load_settings = _load_settings(plan, compile_into)
    if load_settings.quantize == NOT_QUANTIZED:
        loading.check_memory(plan, load_settings.dtype)
    executors, models = plan.load(load_settings, listener)
    config = _config(plan, models)
    shape, *drafts = (model.model_shape for model in models)
    shape = replace(shape, name=plan.name)
    budget = None
    if settings.follow_memory:
        budget = loading.memory_budget(settings, models, listener.note)
    return engine_parts.EngineParts(
        executors=executors,
        config=config,
        shape=shape,
        tokenizer=Tokenizer.from_folder(plan.folder),
        tensor_parallel=plan.degree,
        router=settings.router,
        back_end_note=plan.back_end.note,
        facts=_facts(plan, models[0], config),
        notes=_notes(plan, models, config),
        drafter=drafting.drafter_for(settings, shape, drafts[0] if drafts else None),
        models=models,
        memory_budget=budget,
    )


def _plan(model: str, settings: EngineSection, listener: Listener) -> loading.LoadPlan:
    from lmi_bench.engine.torch_backend.load_settings import DEFAULT_BLOCK_SIZE

    folder = model_folder(model, settings.rope_scaling)
    gpus, cores = loading.gpu_count(settings), settings.threads or usable_cores()
    degree = engine_parts.degree_of(settings, cores if gpus is None else gpus)
    draft_folder = None
    if settings.draft is not None and settings.draft != drafting.NGRAM_DRAFT:
        draft_folder = model_folder(settings.draft)
        drafting.check_same_vocabulary(folder, draft_folder)
    block_size = settings.block_size or DEFAULT_BLOCK_SIZE
    places = [folder] if draft_folder is None else [folder, draft_folder]
    back_end = choose_back_end(settings, places, degree=degree, block_size=block_size, listener=listener)
    is_demo = model in DEMO_NAMES and settings.rope_scaling is None
    named = model if is_demo else folders.folder_name(folder)
    return loading.LoadPlan(*(settings, named, folder, draft_folder, degree, cores, gpus, block_size, back_end))


def _load_settings(plan: loading.LoadPlan, compile_into: Path | None) -> LoadSettings:
    from lmi_bench.engine.torch_backend import load_settings

    settings = plan.settings
    usual, most = load_settings.DEFAULT_MEMORY_SHARE, load_settings.DEFAULT_MOST_CACHE_TOKENS
    if plan.back_end.device == "cuda":
        alone = plan.sharing == 1 and plan.draft_folder is None
        usual, most = load_settings.GPU_MEMORY_SHARE if alone else usual, sys.maxsize
    share = (settings.memory_share or usual) / plan.sharing
    if plan.draft_folder is not None:  # both cache the same tokens
        places = (plan.folder, plan.draft_folder)
        own, drafts = (kv_bytes_per_token(folders.shape_of_folder(each)) for each in places)
        share *= own / (own + drafts)
    return load_settings.LoadSettings(
        dtype=settings.dtype or "bfloat16",
        kv_dtype=settings.kv_dtype,
        num_blocks=settings.num_blocks,
        block_size=plan.block_size,
        memory_share=share,
        most_cache_tokens=settings.max_batch_total_tokens or most,
        threads=max(1, plan.cores // settings.replicas),
        # a draft must sample as the model does, and every copy alike
        sampling_seed=secrets.randbits(62),
        quantize=quantizing.quantize_settings(settings),
        device=plan.back_end.device,
        group_query_attention=settings.group_query_attention,
        steps=step_settings(settings, plan.back_end, out=compile_into),
    )


def _config(plan: loading.LoadPlan, models: Sequence[LoadedModel]) -> SchedulerConfig:
    """The scheduler's configuration; raises InputError for lengths beyond the models' positions."""
    loaded, *drafts = models
    longest = min(model.model_shape.max_positions for model in models)
    derived = SchedulerConfig(
        num_blocks=loaded.num_blocks,
        block_size=plan.block_size,
        max_model_len=min(longest, loaded.num_blocks * plan.block_size),
        # a draft model reads the same blocks, and may have a longer window
        attention_window=None if drafts else loaded.model_shape.attention_window,
    )
    config = engine_parts.scheduler_config(plan.settings, derived)
    if config.max_model_len > longest:
        with_draft = f"with the draft {plan.settings.draft} " if drafts else ""
        raise InputError(
            f"--max-model-len {config.max_model_len:,}: {plan.name} {with_draft}knows {longest:,} positions"
        )
    return config


def _facts(plan: loading.LoadPlan, loaded: LoadedModel, config: SchedulerConfig) -> dict[str, Any]:
    rounding = quantizing.quantize_settings(plan.settings)
    return {
        "kind": "engine",
        "model": plan.name,
        **plan.back_end.facts(),
        "tensor_parallel": plan.degree,
        **engine_parts.replica_facts(plan.settings),
        "weights": loaded.weights_description,
        "free_memory_bytes": loaded.free_memory_bytes,
        "kv_dtype": loaded.kv_dtype,
        "kv_cache_bytes": loaded.kv_cache_bytes,
        **quantizing.quantize_facts(rounding, loaded.weight_bytes, loaded.quantized),
        **step_facts(loaded.prepared),
        **engine_parts.scheduler_facts(plan.settings, config),
    }


def _notes(plan: loading.LoadPlan, models: Sequence[LoadedModel], config: SchedulerConfig) -> tuple[str, ...]:
    loaded, *drafts = models
    settings = plan.settings
    notes = (
        f"{plan.name}: {loaded.model_shape.params_total:,} parameters, {loaded.weights_description}",
        plan.back_end.note,
        f"free memory after loading {bytes_to_gib(loaded.free_memory_bytes):.1f} GiB; KV "
        f"cache {bytes_to_gib(loaded.kv_cache_bytes):.2f} GiB in {config.num_blocks:,} "
        f"blocks of {config.block_size}, {config.cache_tokens:,} tokens"
        + (" a replica" if settings.replicas > 1 else ""),
        *quantizing.quantize_notes(loaded.quantized),
        *step_notes(settings, loaded.prepared),
        _layout_note(plan, loaded),
        *(
            f"draft {settings.draft}: {draft.model_shape.params_total:,} parameters, "
            f"{draft.weights_description}; KV cache {bytes_to_gib(draft.kv_cache_bytes):.2f} GiB"
            for draft in drafts
        ),
        *drafting.speculation_notes(settings),
        *idle_in_engine("bundled", settings),
    )
    return tuple(filter(None, notes))


def _layout_note(plan: loading.LoadPlan, loaded: LoadedModel) -> str:
    """Number of processes and how they communicate; empty for one process."""
    copies, degree = plan.settings.replicas, plan.degree
    parts = [engine_parts.replica_note(plan.settings)]
    if degree > 1:
        transport = loaded.transport.replace("_", " ")
        parts.append(f"{degree} ranks{' each' if copies > 1 else ''}, sums over {transport}")
    note = "; ".join(filter(None, parts))
    if note and copies * degree > plan.cores:
        note += f" (warning: {copies * degree} processes share {plan.cores} cores)"
    return note


def model_folder(model: str, rope_scaling: str | None = None) -> Path:
    """The folder of a model, with rope scaling if stated; a demo model is created if missing.
    Raises InputError if the model is neither a folder nor a demo model."""
    from lmi_bench.engine.torch_backend.demo import DEMO_MODELS, ensure_demo_model

    trained = folders.trained_folder(model)
    if trained is None and model not in DEMO_MODELS and not Path(model).is_dir():
        names = ", ".join((*DEMO_MODELS, *folders.TRAINED_NAMES))
        raise InputError(
            f"model {model!r} is neither a folder nor a demo model ({names}): "
            "give the path of a Hugging Face folder (config.json, *.safetensors, tokenizer.json)"
        )
    folder = ensure_demo_model(model) if model in DEMO_MODELS else trained or Path(model)
    if rope_scaling is None:
        return folder
    return folders.rope_scaled_folder(folder, folders.parse_rope_scaling(rope_scaling))


def round_weights(
    model: str, settings: EngineSection, out: Path | None, listener: Listener = SILENT
) -> tuple[dict[str, float], int]:
    """Relative error of each matrix's outputs after rounding, by its name in the checkpoint.

    out  new folder for the model with the rounded weights, whose bytes are returned; None: none
    """
    from lmi_bench.engine.torch_backend.quantization.export import export_quantized, layer_errors

    folder, scheme = model_folder(model), quantizing.quantize_settings(settings)
    options: dict[str, Any] = {"dtype": settings.dtype or "bfloat16", "tell": listener.progress}
    errors = layer_errors(folder, scheme, **options)
    return errors, 0 if out is None else export_quantized(folder, out, scheme, **options)
