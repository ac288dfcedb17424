"""What a recipe needs before it is run: memory of each variant, and the cheapest machine for it.

An optimization job holds, one after the other: the float model whole while calibration looks at it
(AWQ, SmoothQuant), and each variant's weights with the cache of its largest level while it is
measured. The largest of these decides; machines are those of the catalog with a price.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_bench.analysis.model.memory import (
    BITS_PER_BYTE,
    embedding_params,
    kv_bytes_per_token,
    weight_bytes,
)
from lmi_bench.catalog.instances import Instance, all_instances
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.jobs.recipe import BASELINE, Recipe, load_recipe
from lmi_bench.jobs.settings.optimize import OptimizeSettings
from lmi_bench.models.folder import is_model_folder, shape_of_folder
from lmi_bench.models.shape import ModelShape

USABLE_FRAC: Final = 0.9
"""Of an accelerator's memory; the rest is the runtime's and activations'."""

_FLOATS: Final = "bfloat16"
_FORMATS: Final = {
    "none": _FLOATS,
    "int8": "int8",
    "smoothquant": "int8",
    "awq": "int4",
    "awq-int4": "int4",
    "awq-int3": "int4",  # and a bit less for each weight
    "fp8": "float8",
}
_CALIBRATED: Final = ("awq", "awq-int4", "awq-int3", "smoothquant")


@dataclass(frozen=True, slots=True)
class JobNeed:
    """Bytes on all devices together.

    prepare_bytes  while weights are rounded; measure_bytes: while the variant is measured
    devices        that the variant's tensor parallelism asks for, at the least
    """

    name: str
    prepare_bytes: int
    measure_bytes: int
    devices: int = 1

    @property
    def peak_bytes(self) -> int:
        """The larger one."""
        return max(self.prepare_bytes, self.measure_bytes)


def job_need(recipe: Recipe, shape: ModelShape, name: str, settings: EngineSection) -> JobNeed:
    """What one variant takes.

    prepare = float weights where calibration looks at them, else those of the variant's format
    measure = weights of the format + draft + largest concurrency * (input + output) * KV bytes
    """
    scheme = settings.quantize
    weights = weight_bytes(shape, _FORMATS[scheme])
    if scheme == "awq-int3":
        weights -= (shape.params_total - embedding_params(shape)) // BITS_PER_BYTE
    evaluate = recipe.evaluate
    tokens = max(evaluate.concurrency) * (evaluate.input_tokens + evaluate.output_tokens)
    shapes = [shape]
    if settings.draft is not None and settings.draft != "ngram":
        shapes.append(_shape(settings.draft))
    drafts = sum(weight_bytes(each, _FLOATS) for each in shapes[1:])
    cache = round(tokens * sum(kv_bytes_per_token(each) for each in shapes))
    return JobNeed(
        name,
        weight_bytes(shape, _FLOATS) if scheme in _CALIBRATED else weights,
        weights + drafts + cache,
        settings.tensor_parallel if isinstance(settings.tensor_parallel, int) else 1,
    )


def cheapest_machine(
    need_bytes: int, instances: Iterable[Instance], *, devices: int = 1
) -> Instance | None:
    """The one with the lowest price whose accelerators, at least so many, together hold so much;
    None: none does."""
    fitting = [
        instance
        for instance in instances
        if instance.price_usd_per_hour is not None
        and instance.num_accelerators >= devices
        and instance.neuron_cores is None  # the bundled engine does not run there
        and instance.num_accelerators * instance.accelerator.memory_bytes * USABLE_FRAC
        >= need_bytes
    ]
    return min(
        fitting, key=lambda each: (each.price_usd_per_hour, each.instance_type), default=None
    )


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What each variant of a recipe needs; a machine is None where none of the catalog holds it.

    machine  the cheapest one for the whole job
    """

    model: str
    needs: tuple[tuple[JobNeed, Instance | None], ...]
    machine: Instance | None


def plan_job(settings: OptimizeSettings) -> JobPlan:
    """The need of every variant, and the machine for the whole job."""
    if settings.recipe is None:
        raise InputError("name a recipe file, or --list for the techniques that it may combine")
    recipe = load_recipe(settings.recipe)
    shape = _shape(settings.model or recipe.model)
    variants = [(BASELINE, recipe.settings(None))]
    variants += [(variant.name, recipe.settings(variant)) for variant in recipe.variants]
    needs = [job_need(recipe, shape, each, engine) for each, engine in variants]

    def machine_for(bytes_: int, devices: int) -> Instance | None:
        return cheapest_machine(bytes_, all_instances(), devices=devices)

    return JobPlan(
        shape.name,
        tuple((need, machine_for(need.peak_bytes, need.devices)) for need in needs),
        machine_for(max(n.peak_bytes for n in needs), max(n.devices for n in needs)),
    )


def _shape(model: str) -> ModelShape:
    """Of a folder or a catalog name; InputError where it is neither."""
    folder = Path(model)
    return shape_of_folder(folder) if is_model_folder(folder) else find_model(model)
