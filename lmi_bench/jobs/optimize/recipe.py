"""A recipe: combinations of techniques, the data to judge them on, and the memory they need."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, PositiveInt, model_validator

from lmi_bench.analysis.model import memory
from lmi_bench.catalog.instances import Instance, all_instances
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection, parse_scenario, read_yaml
from lmi_bench.core.scenario_fields import Positive
from lmi_bench.core.scenario_sections import Section
from lmi_bench.engine.quantization import Scheme, parse_scheme
from lmi_bench.jobs.files import checked
from lmi_bench.jobs.settings.bundled import OptimizeSettings
from lmi_bench.models.folder import is_model_folder, shape_of_folder, trained_folder
from lmi_bench.models.shape import ModelShape

BASELINE, BASELINE_AGAIN = "baseline", "baseline-again"


class Evaluation(Section):
    """The data on which quality and speed are measured.

    text               file for the perplexity (text, or JSON lines with `text` or `prompt`); None:
                       a part of the sample text that calibration does not use, or of what a
                       trained model in the box has not seen
    dataset            JSON lines with `prompt` and optionally `output_tokens` for speed and
                       agreement; None: prompts of `input_tokens`, made up or from that text
    agreement_prompts  requests whose greedy outputs are compared with the baseline's
    requests_per_user  closed loop: a level sends concurrency times this many, in each round
    rounds             sweeps of each variant, in turn, so that a drift of the machine meets all
    usd_per_hour       price of this machine; None: no cost is printed
    """

    text: str | None = None
    text_tokens: PositiveInt = 4096
    dataset: str | None = None
    input_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 64
    concurrency: tuple[PositiveInt, ...] = Field((1, 8), min_length=1)
    requests_per_user: PositiveInt = 3
    rounds: PositiveInt = 3
    agreement_prompts: PositiveInt = 8
    usd_per_hour: Positive | None = None


class Variant(Section):
    """A combination of techniques.

    engine  changes to the recipe's engine settings
    save    keep the quantized weights as a folder that can be served
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
    engine: dict[str, Any]
    save: bool = False


class Recipe(Section):
    """A whole job.

    engine  settings of the baseline, as in a scenario; variants change them
    """

    model: Annotated[str, Field(min_length=1)] = "demo-text"
    engine: EngineSection = EngineSection()
    evaluate: Evaluation = Evaluation()
    variants: tuple[Variant, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> "Recipe":
        if not self.variants:
            raise ValueError("variants: name at least one combination to try")
        names = [BASELINE, BASELINE_AGAIN, *(variant.name for variant in self.variants)]
        if len(set(names)) < len(names):
            raise ValueError(f"variants need names of their own, none of them {BASELINE!r} or {BASELINE_AGAIN!r}")
        return self

    def settings(self, variant: Variant | None) -> EngineSection:
        """The engine's settings of a variant, or of the baseline; InputError for a bad change."""
        if variant is None:
            return self.engine
        stated = {**self.engine.model_dump(exclude_unset=True), **variant.engine}
        return parse_scenario({"engine": stated}, source=f"variant {variant.name}").engine


def stated_recipe(settings: OptimizeSettings) -> Recipe:
    """The recipe of the settings, with what they replace; its own files are found from its folder.

    Raises InputError that lists every mistake, or if the settings name no recipe.
    """
    path = settings.recipe
    if path is None:
        raise InputError("name a recipe file, or --list for the techniques that it may combine")
    content = parse_recipe(read_yaml(path), source=str(path)).model_dump(exclude_unset=True)
    evaluate = content.setdefault("evaluate", {})
    for name, stated in (("dataset", settings.dataset), ("text", settings.text)):
        if stated is not None:
            evaluate[name] = str(stated)
        elif evaluate.get(name) is not None:
            evaluate[name] = str(path.parent / evaluate[name])  # an absolute one stays
    if settings.model is not None:
        content["model"] = settings.model
    return parse_recipe(content)


def parse_recipe(content: object, *, source: str = "recipe") -> Recipe:
    """A recipe from plain values; raises InputError that lists every mistake."""
    expected = "`variants`, a list, and optionally `model`, `engine` and `evaluate`"
    recipe = checked(Recipe, content, source=source, expected=expected)
    for variant in recipe.variants:
        recipe.settings(variant)
    return recipe


USABLE_FRAC: Final = 0.9
"""Usable share of an accelerator's memory; the rest is for the runtime and activations."""

_FLOATS: Final = "bfloat16"
_FORMATS: Final = {Scheme.NONE: _FLOATS, Scheme.FP8: "float8"}
_NARROWEST_BITS: Final = 4  # of the planner's formats


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on all devices together.

    prepare_bytes  while weights are rounded; measure_bytes: while the variant is measured
    devices        minimum number, for the variant's tensor parallelism
    """

    name: str
    prepare_bytes: int
    measure_bytes: int
    devices: int = 1

    @property
    def peak_bytes(self) -> int:
        """The larger of both."""
        return max(self.prepare_bytes, self.measure_bytes)


def memory_need(recipe: Recipe, shape: ModelShape, name: str, engine: EngineSection) -> MemoryNeed:
    """The memory that one variant needs.

    prepare = float weights if the scheme is calibrated, else the weights in its format
    measure = replicas * (weights of the format + draft)
              + largest concurrency * (input + output) * KV bytes
    """
    scheme = parse_scheme(engine.quantize)
    bits = max(_NARROWEST_BITS, scheme.bits)
    floats = engine.dtype or _FLOATS
    own = _FORMATS | {Scheme.NONE: floats}
    weights = memory.weight_bytes(shape, own.get(scheme, f"int{bits}"))
    rounded = shape.params_total - memory.embedding_params(shape)
    weights -= (bits - scheme.bits) * rounded // memory.BITS_PER_BYTE
    evaluate = recipe.evaluate
    tokens = max(evaluate.concurrency) * (evaluate.input_tokens + evaluate.output_tokens)
    shapes = [shape]
    if engine.draft is not None and engine.draft != "ngram":
        shapes.append(_shape(engine.draft))
    drafts = sum(memory.weight_bytes(each, floats) for each in shapes[1:])
    width = memory.kv_bytes_per_value(floats, engine.kv_dtype)
    cache = sum(memory.kv_bytes_per_token(each, bytes_per_value=width) for each in shapes)
    return MemoryNeed(
        name,
        memory.weight_bytes(shape, floats) if scheme.calibrated else weights,
        (weights + drafts) * engine.replicas + round(tokens * cache),
        engine.tensor_parallel if isinstance(engine.tensor_parallel, int) else 1,
    )


def cheapest_machine(need_bytes: int, instances: Iterable[Instance], *, devices: int = 1) -> Instance | None:
    """The cheapest machine with enough accelerators, and enough memory on all of them; or None."""
    fitting = [
        instance
        for instance in instances
        if instance.price_usd_per_hour is not None
        and instance.num_accelerators >= devices
        and instance.neuron_cores is None  # the bundled engine does not run there
        and instance.num_accelerators * instance.accelerator.memory_bytes * USABLE_FRAC >= need_bytes
    ]
    return min(fitting, key=lambda one: (one.price_usd_per_hour, one.instance_type), default=None)


def plan_job(settings: OptimizeSettings) -> tuple[str, list[tuple[MemoryNeed, Instance | None]], Instance | None]:
    """The model's name, the need of every variant with its cheapest machine, and the cheapest one
    for the whole job; None: no machine of the catalog has enough memory."""
    recipe = stated_recipe(settings)
    shape = _shape(recipe.model)
    variants = [(BASELINE, recipe.settings(None))]
    variants += [(variant.name, recipe.settings(variant)) for variant in recipe.variants]
    needs = [memory_need(recipe, shape, each, engine) for each, engine in variants]
    machine_for = partial(cheapest_machine, instances=all_instances())
    return (
        shape.name,
        [(need, machine_for(need.peak_bytes, devices=need.devices)) for need in needs],
        machine_for(max(n.peak_bytes for n in needs), devices=max(n.devices for n in needs)),
    )


def _shape(model: str) -> ModelShape:
    """The shape of a folder or a catalog name; raises InputError for another text."""
    folder = trained_folder(model) or Path(model)
    return shape_of_folder(folder) if is_model_folder(folder) else find_model(model)
