"""Which layouts a catalog offers: machine, tensor-parallel degree, copies on the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.capacity import planned_model_for, scheduler_config_for
from lmi_bench.analysis.profiles import EngineProfile
from lmi_bench.analysis.speculation import Speculation
from lmi_bench.analysis.steady_state import SteadyState
from lmi_bench.catalog.accelerators import NO_LINK, Link
from lmi_bench.catalog.instances import Instance
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.errors import InputError
from lmi_bench.model_shape import ModelShape, tensor_parallel_problem

EngineKey = tuple[str, Link, int]
"""Accelerator, link and tensor-parallel degree: what decides the speed of one copy."""

_DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a machine is used: `copies` of the model on `tensor_parallel` devices each."""

    instance: Instance
    tensor_parallel: int

    @property
    def copies(self) -> int:
        """Copies of the model on one machine."""
        return self.instance.num_accelerators // self.tensor_parallel

    @property
    def engine_key(self) -> EngineKey:
        """What decides the speed of one copy; layouts with equal keys are simulated once."""
        link = self.instance.link if self.tensor_parallel > 1 else NO_LINK
        return self.instance.accelerator.name, link, self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Rejection:
    """A layout that is out, and why; `tensor_parallel` is None where no degree helps."""

    instance_type: str
    tensor_parallel: int | None
    copies: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One copy of the model as the engine would run it."""

    config: SchedulerConfig
    steady: SteadyState


@dataclass(frozen=True, slots=True)
class Workload:
    """Equal requests of a model in a number format.

    dtype, kv_dtype  of the weights, and of the cache; None: as the weights, 16 bits beside
                     narrower ones
    speculation      of the engine; None: one token a step
    """

    shape: ModelShape
    dtype: str
    input_tokens: int
    output_tokens: int
    kv_dtype: str | None = None
    speculation: Speculation | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of one request, input and output."""
        return self.input_tokens + self.output_tokens


def layouts_of(instance: Instance, degrees: Sequence[int] | None = None) -> Iterator[Layout]:
    """The layouts of a machine: powers of two and the whole machine, or the given degrees."""
    most = instance.num_accelerators
    wanted = sorted({*_DEGREES, most}) if degrees is None else degrees
    for degree in wanted:
        if 1 <= degree <= most:
            yield Layout(instance, degree)


def plan_copy(
    layout: Layout, workload: Workload, profile: EngineProfile, *, open_loop: bool
) -> CopyPlan:
    """The scheduler and the speed of one copy.

    Raises InputError (CapacityError for memory) with the reason where it cannot run.
    """
    problem = tensor_parallel_problem(workload.shape, layout.tensor_parallel)
    if problem is not None:
        raise InputError(problem)
    common = (
        workload.shape,
        layout.instance,
        layout.tensor_parallel,
        workload.dtype,
        profile,
    )
    more: dict[str, Any] = {"kv_dtype": workload.kv_dtype, "speculation": workload.speculation}
    model = planned_model_for(*common, **more)
    config = scheduler_config_for(*common, workload.total_tokens, **more)
    return CopyPlan(
        config=config,
        steady=SteadyState(
            model=model,
            input_tokens=workload.input_tokens,
            output_tokens=workload.output_tokens,
            slots=slots_of(config, workload),
            open_loop=open_loop,
            batch_limit=config.max_rolling_batch_size,
        ),
    )


def slots_of(config: SchedulerConfig, workload: Workload) -> int:
    """Sequences that run together: guaranteed if lengths are reserved, expected if paged."""
    held = workload.total_tokens
    if config.kv_layout is KvLayout.PAGED:
        held = workload.input_tokens + workload.output_tokens // 2
    blocks = -(-held // config.block_size)
    return max(1, min(config.num_blocks // blocks, config.max_rolling_batch_size))


def split_layouts(
    instances: Iterable[Instance],
    workload: Workload,
    profile: EngineProfile,
    *,
    degrees: Sequence[int] | None,
    open_loop: bool,
) -> tuple[list[tuple[Layout, CopyPlan]], list[Rejection]]:
    """Layouts that can run, each with its plan, and the others with their reasons."""
    plans: dict[EngineKey, CopyPlan | str] = {}
    possible: list[tuple[Layout, CopyPlan]] = []
    rejected: list[Rejection] = []
    for instance in instances:
        accelerator = instance.accelerator
        blanket = None
        if accelerator.vendor not in profile.vendors:
            blanket = f"{profile.label} does not run on {accelerator.name}"
        elif accelerator.bandwidth_bytes_per_s is None:
            blanket = f"no source states the memory bandwidth of {accelerator.name}"
        if blanket is not None:
            rejected.append(Rejection(instance.instance_type, None, None, blanket))
            continue
        for layout in layouts_of(instance, degrees):
            key = layout.engine_key
            if key not in plans:
                try:
                    plans[key] = plan_copy(layout, workload, profile, open_loop=open_loop)
                except InputError as exc:
                    plans[key] = str(exc).removeprefix(f"{instance.instance_type}: ")
            plan = plans[key]
            if isinstance(plan, CopyPlan):
                possible.append((layout, plan))
            else:
                rejected.append(
                    Rejection(instance.instance_type, layout.tensor_parallel, layout.copies, plan)
                )
    return possible, rejected
