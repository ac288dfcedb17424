"""What `optimize` is asked to do: techniques in combination, and the data to judge them by.

A recipe is YAML, checked whole as a scenario is. Each variant is a set of changes to the engine's
settings; the first thing measured is the engine without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection, parse_scenario

BASELINE = "baseline"

PositiveUsd = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Evaluation(_Section):
    """The data that quality and speed are taken from.

    text           perplexity is over this file (text, or JSON lines with `text` or `prompt`); by
                   default a part of the sample text that calibration does not see
    text_tokens    most tokens of it
    dataset        JSON lines with `prompt` and, if wanted, `output_tokens`: speed and agreement
                   are measured on its requests; by default made-up prompts of `input_tokens`
    agreement_prompts  requests whose greedy outputs are held against the baseline's
    requests_per_user  closed loop: a level sends concurrency times this many
    usd_per_hour   price of this machine; None: no cost is printed
    """

    text: str | None = None
    text_tokens: PositiveInt = 4096
    dataset: str | None = None
    input_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 64
    concurrency: tuple[PositiveInt, ...] = Field((1, 8), min_length=1)
    requests_per_user: PositiveInt = 3
    agreement_prompts: PositiveInt = 8
    usd_per_hour: PositiveUsd | None = None


class Variant(_Section):
    """A combination of techniques.

    engine  changes to the recipe's engine settings
    save    keep the quantized weights as a folder that can be served
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
    engine: dict[str, Any]
    save: bool = False


class Recipe(_Section):
    """A whole job.

    model   a demo model or a Hugging Face folder
    engine  settings of the baseline, as in a scenario; variants change them
    """

    model: Annotated[str, Field(min_length=1)] = "demo-15m"
    engine: EngineSection = EngineSection()
    evaluate: Evaluation = Evaluation()
    variants: tuple[Variant, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Recipe:
        if not self.variants:
            raise ValueError("variants: name at least one combination to try")
        names = [BASELINE, *(variant.name for variant in self.variants)]
        if len(set(names)) < len(names):
            raise ValueError(f"variants need names of their own, none of them {BASELINE!r}")
        return self

    def settings(self, variant: Variant | None) -> EngineSection:
        """The engine's settings of a variant, or of the baseline; InputError for a bad change."""
        if variant is None:
            return self.engine
        stated = {**self.engine.model_dump(exclude_unset=True), **variant.engine}
        return parse_scenario({"engine": stated}, source=f"variant {variant.name}").engine


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe; raises InputError that lists every mistake."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path}: not UTF-8 text (byte {exc.start})") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path}: not YAML: {' '.join(str(exc).split())}") from exc
    recipe = parse_recipe(content, source=str(path))
    changes = {
        name: str(path.parent / given)
        for name in ("text", "dataset")
        if (given := getattr(recipe.evaluate, name)) is not None and not Path(given).is_absolute()
    }
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update=changes)})


def parse_recipe(content: object, *, source: str = "recipe") -> Recipe:
    """A recipe from plain values; raises InputError that lists every mistake."""
    if not isinstance(content, dict):
        raise InputError(f"{source}: expected `model` and `variants`, got {content!r}")
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as exc:
        lines = [
            f"  {'.'.join(map(str, error['loc'])) or 'recipe'}: {error['msg']}"
            for error in exc.errors()
        ]
        noun = "mistake" if len(lines) == 1 else "mistakes"
        raise InputError(f"{source}: {len(lines)} {noun}\n" + "\n".join(lines)) from exc
    for variant in recipe.variants:
        recipe.settings(variant)
    return recipe
