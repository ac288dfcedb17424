"""Compiles a decode step to a package with torch.export and AOTInductor, and loads it."""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.kv_cache import KvCache
from lmi_bench.engine.torch_backend.static.artefact import ArtefactKey
from lmi_bench.engine.torch_backend.static.buffers import StepBuffers
from lmi_bench.engine.torch_backend.static.shapes import StaticShape
from lmi_bench.engine.torch_backend.static.step import DecodeStep
from lmi_bench.models.spec import DecoderSpec

_CPU_INFO: Final = Path("/proc/cpuinfo")

SETTINGS: Final[dict[str, Any]] = {"cpp.dynamic_threads": True}
"""Compiler settings: use the number of threads of the process that runs the step."""

STEP_VERSION: Final = 2
"""Version of the compiled step; a new one invalidates all older packages."""


def key_of(
    spec: DecoderSpec,
    cache: KvCache,
    *,
    tensor_parallel: int,
    stored: torch.dtype,
    compute: torch.dtype,
    quantize: str,
) -> ArtefactKey:
    """The key of this model's compiled steps on this machine."""
    layers = json.dumps(asdict(spec), sort_keys=True, default=str)
    return ArtefactKey(
        model=hashlib.sha256(layers.encode()).hexdigest()[:16],
        tensor_parallel=tensor_parallel,
        weights=_name(stored),
        compute=_name(compute),
        kv_dtype=_name(cache.shape.dtype),
        quantize=quantize,
        block_size=cache.shape.block_size,
        device=device_name(cache.keys[0].device),
        torch=torch.__version__,
        settings=json.dumps({**SETTINGS, "step": STEP_VERSION}, sort_keys=True),
    )


def device_name(device: torch.device) -> str:
    """The hardware that compiled code needs: a GPU's type, or a processor's instruction set."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    level = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}, {level}, features {_cpu_features()}"


def _cpu_features() -> str:
    """A hash of the first core's instruction sets, which the compiler may all use."""
    if not _CPU_INFO.is_file():
        return platform.processor() or "unknown"
    for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            names = " ".join(sorted(line.partition(":")[2].split()))
            return hashlib.sha256(names.encode()).hexdigest()[:8]
    return "unknown"


def compile_step(
    step: DecodeStep,
    shape: StaticShape,
    cache: KvCache,
    norms: Sequence[Tensor],
    path: Path,
) -> None:
    """Write the package of one shape, for any number of cache blocks.

    Raises InputError without a C++ compiler.
    """
    buffers = StepBuffers(
        shape,
        block_size=cache.shape.block_size,
        spare_block=0,
        device=cache.keys[0].device,
    )
    inputs = (
        buffers.token_ids,
        buffers.positions,
        buffers.block_tables,
        cache.keys,
        cache.values,
        list(norms),
    )
    blocks = torch.export.Dim("blocks", min=2)
    layers = len(cache.keys)
    shapes = (
        None,
        None,
        None,
        [{0: blocks}] * layers,
        [{0: blocks}] * layers,
        [None] * len(norms),
    )
    # importing the compiler's own modules raises deprecation warnings about torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        warnings.simplefilter("ignore", category=FutureWarning)
        _compile(step, inputs, shapes, path)


def _compile(
    step: DecodeStep, inputs: tuple[Any, ...], shapes: tuple[Any, ...], path: Path
) -> None:
    from torch._inductor.exc import InductorError  # takes seconds: import only to compile

    with torch.no_grad():
        program = torch.export.export(step, inputs, dynamic_shapes=shapes)
    aot: Any = torch._inductor.aoti_compile_and_package
    try:
        aot(program, package_path=str(path), inductor_configs=dict(SETTINGS))
    except InductorError as exc:
        raise InputError(f"the step cannot be compiled here: {str(exc).splitlines()[0]}") from exc


def load_step(
    path: Path, buffers: StepBuffers, cache: KvCache, norms: Sequence[Tensor]
) -> Callable[[], Tensor]:
    """Load a package's step over a shape's buffers; it returns logits."""
    device = cache.keys[0].device
    loader = torch._C._aoti.AOTIModelPackageLoader(
        str(path), "model", True, 1, device.index if device.type == "cuda" else -1
    )
    inputs = [
        buffers.token_ids,
        buffers.positions,
        buffers.block_tables,
        *cache.keys,
        *cache.values,
        *norms,
    ]

    def run() -> Tensor:
        logits: Tensor = loader.run(inputs)[0]
        return logits

    return run


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
