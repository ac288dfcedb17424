"""Prepares decode steps for a loaded model: compiled, captured, both, or neither."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.kv_cache import FLOAT8
from lmi_bench.engine.torch_backend.runner import Forward, TorchForward
from lmi_bench.engine.torch_backend.static import artefact as artefacts
from lmi_bench.engine.torch_backend.static import step
from lmi_bench.engine.torch_backend.static.artefact import StaticShape
from lmi_bench.engine.torch_backend.static.forward import (
    CudaGraphRecorder,
    Replay,
    StaticForward,
    StepBuffers,
    StepResult,
    prepare_shapes,
)
from lmi_bench.engine.torch_backend.weights import Tell

SPARE_BLOCKS: Final = 1  # extra cache blocks for the padding of prepared steps


class Kernels(Forward, Protocol):
    """A model's steps with another back end's kernels."""

    def __call__(self, buffers: StepBuffers) -> StepResult:
        """A decode step over a prepared shape."""


MakeKernels = Callable[[TorchForward], Kernels]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Which decode steps are prepared at start.

    compiled   compile steps, or load compiled ones; artefact: load only from this folder
    out        compile into this folder instead of the user's cache
    captured   record CUDA graphs; no effect on a CPU
    shapes     empty: a few for the model's length
    most_sequences  largest batch size for captured kernels
    max_tokens longest sequence; None: the limit of model and cache
    kernels    another back end's kernels instead of torch's; their attention reads no padding
    """

    compiled: bool = False
    artefact: Path | None = None
    out: Path | None = None
    captured: bool = False
    shapes: tuple[StaticShape, ...] = ()
    max_tokens: int | None = None
    most_sequences: int = 256
    kernels: MakeKernels | None = None

    @property
    def wanted(self) -> bool:
        """True if anything is to be prepared."""
        makes = self.compiled or self.captured or self.kernels is not None
        return makes or self.artefact is not None


NOTHING_PREPARED: Final = StepSettings()


@dataclass(frozen=True, slots=True)
class PreparedSteps:
    """Result of preparing steps, for the start-up line and a run's manifest.

    artefact    the compiled steps; None if nothing was compiled
    ready_s     time of all preparation
    graph_bytes device memory of captured graphs; None if none were captured
    """

    shapes: tuple[StaticShape, ...]
    artefact: artefacts.Artefact | None
    ready_s: float
    graph_bytes: int | None


@dataclass(frozen=True, slots=True)
class Forwards:
    """A loaded model over a new cache: its eager steps and, if wanted, its prepared ones."""

    eager: TorchForward
    static: StaticForward | None = None
    prepared: PreparedSteps | None = None

    @property
    def forward(self) -> Forward:
        """What runs the steps."""
        return self.static or self.eager


def _is_without(eager: TorchForward, settings: StepSettings) -> bool:
    """True for a model that has no such steps; InputError if they must be compiled."""
    spec = eager.model.spec
    without = bool(spec.sinks or spec.latent_rank)
    compiled = settings.compiled or settings.artefact is not None
    if compiled and eager.cache.shape.dtype is FLOAT8:
        raise InputError("compiled steps have no float8 cache: leave --kv-dtype float8 out")
    if without and compiled:
        raise InputError(f"{eager.shape.name}: steps with sinks or latent attention cannot be compiled")
    return without


def with_prepared_steps(
    eager: TorchForward,
    settings: StepSettings,
    *,
    tensor_parallel: int = 1,
    quantize: str = "none",
    tell: Tell | None = None,
) -> Forwards:
    """The wanted decode steps, and the others in `eager`, whose cache then has SPARE_BLOCKS
    more blocks than its sequences use.

    Raises InputError if an artefact does not match or steps cannot be compiled here.
    """
    if not settings.wanted or _is_without(eager, settings):
        return Forwards(eager)
    start_s = time.monotonic()
    model, cache = eager.model, eager.cache
    device, size = cache.keys[0].device, cache.shape.block_size
    capacity = eager.num_blocks * size
    most = min(model.shape.max_positions, capacity, settings.max_tokens or capacity)
    shapes = artefacts.fitted(_shapes(settings, most), max_tokens=most, block_size=size)
    operators = step.DecodeStep(model, cache)
    artefact: artefacts.Artefact | None = None
    if settings.compiled or settings.artefact is not None:
        key = step.key_of(eager, tensor_parallel=tensor_parallel, quantize=quantize)
        if settings.artefact is not None:
            artefact = artefacts.open_artefact(settings.artefact, key)
            longest = artefacts.rounded_up(most, size)  # an artefact may have longer shapes
            shapes = tuple(s for s in artefact.packages if s.context_tokens <= longest)
        else:
            folder = settings.out or artefacts.default_folder(key)
            report = None if tell is None else partial(tell, "compiling decode steps")
            artefact = artefacts.make_artefact(folder, key, shapes, operators.compile_into, report)
    recorder = None
    if settings.captured and device.type == "cuda":
        recorder = CudaGraphRecorder(device)
    make_buffers = partial(StepBuffers, block_size=size, spare_block=eager.num_blocks, device=device)
    packages = {} if artefact is None else artefact.packages
    kernels = None if settings.kernels is None else settings.kernels(eager)

    def make_step(buffers: StepBuffers) -> Replay:
        if kernels is not None:
            return partial(kernels, buffers)
        return operators.over(buffers, packages.get(buffers.shape))

    record = (lambda step: step) if recorder is None else recorder.record
    prepared = prepare_shapes(shapes, make_buffers, make_step, record)
    facts = PreparedSteps(
        shapes=tuple(sorted(prepared)),
        artefact=artefact,
        ready_s=time.monotonic() - start_s,
        graph_bytes=None if recorder is None else recorder.held_bytes,
    )
    on_gpu = kernels is not None or recorder is not None
    return Forwards(eager, StaticForward(kernels or eager, prepared, splits=on_gpu), facts)


def _shapes(settings: StepSettings, max_tokens: int) -> tuple[StaticShape, ...]:
    """The configured shapes or defaults: many batch sizes for captured kernels, which cost little;
    few for compiled steps, which take a minute each and read their padding."""
    if settings.kernels is None or settings.shapes:
        return settings.shapes or artefacts.default_shapes(max_tokens=max_tokens)
    return artefacts.graph_shapes(most_sequences=settings.most_sequences, max_tokens=max_tokens)
