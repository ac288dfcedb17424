"""Every machine of the catalog for one model: accelerators in four steps, then latency and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.fleet.accelerator_comparison import (
    FourSteps,
    MachineFigures,
    four_steps,
    machine_figures,
)
from lmi_bench.analysis.fleet.presets import Preset, presets
from lmi_bench.analysis.level.layouts import Rejection, Workload
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, planned_dtype
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import all_instances
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import jumpstart_concurrency, jumpstart_extremes
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.jobs.planned import repriced
from lmi_bench.jobs.settings.accelerators import AcceleratorSettings
from lmi_bench.targets.profiles import find_profile


@dataclass(frozen=True, slots=True)
class AcceleratorComparison:
    """The four steps of each accelerator, and the predicted figures of each layout.

    rejected  layouts that the model does not run on, with the reason
    """

    workload: Workload
    profile: EngineProfile
    steps: list[FourSteps]
    figures: list[MachineFigures]
    rejected: list[Rejection]

    def to_json(self) -> dict[str, Any]:
        """As `compare-accelerators --json` writes it."""
        return {
            "schema_version": 1,
            "model": self.workload.shape.name,
            "dtype": self.workload.dtype,
            "profile": self.profile.provenance,
            "four_steps": [row.to_json() for row in self.steps],
            "layouts": [each.to_json() for each in self.figures],
        }


def compare_accelerators(
    settings: AcceleratorSettings, listener: Listener = SILENT
) -> AcceleratorComparison:
    """Predict the model on each machine. Raises InputError for an unknown model or profile."""
    workload = Workload(
        find_model(settings.model),
        planned_dtype(settings.model, settings.dtype),
        settings.input_tokens,
        settings.output_tokens,
    )
    instances = repriced(all_instances(), settings.price_list)
    profile = find_profile(settings.profile)
    figures, rejected = machine_figures(instances, workload, profile)
    if (text := dtype_note(settings.model, settings.dtype)) is not None:
        listener.note(text)
    return AcceleratorComparison(
        workload, profile, four_steps(instances, workload), figures, rejected
    )


def measured_presets(model: str | None) -> list[Preset]:
    """Measured configurations of one model, or of all; raises InputError for an unknown model."""
    cells = (*jumpstart_concurrency(), *jumpstart_extremes())
    names = sorted({cell.model for cell in cells})
    if model is not None:
        wanted = "".join(filter(str.isalnum, model.lower()))
        chosen = [name for name in names if "".join(filter(str.isalnum, name.lower())) == wanted]
        if not chosen:
            raise InputError(f"model {model!r} was not measured; there are: {', '.join(names)}")
        cells = tuple(cell for cell in cells if cell.model in chosen)
    prices = {each.instance_type: each.price_usd_per_hour for each in all_instances()}
    return list(presets(cells, prices))
