"""Measured serving configurations as a table."""

from __future__ import annotations

from lmi_bench.analysis.fleet.presets import presets
from lmi_bench.catalog.instances import all_instances
from lmi_bench.catalog.published import jumpstart_concurrency, jumpstart_extremes
from lmi_bench.cli.console import note, print_table
from lmi_bench.core.errors import InputError


def print_presets(model: str | None) -> None:
    """Of one model or of all; raises InputError for a model that was not measured."""
    cells = (*jumpstart_concurrency(), *jumpstart_extremes())
    names = sorted({cell.model for cell in cells})
    if model is not None:
        wanted = "".join(filter(str.isalnum, model.lower()))
        chosen = [name for name in names if "".join(filter(str.isalnum, name.lower())) == wanted]
        if not chosen:
            raise InputError(f"model {model!r} was not measured; there are: {', '.join(names)}")
        cells = tuple(cell for cell in cells if cell.model in chosen)
    prices = {each.instance_type: each.price_usd_per_hour for each in all_instances()}
    rows = [
        {
            "model": preset.cell.model,
            "in/out": f"{preset.cell.input_tokens}/{preset.cell.output_tokens}",
            "choose for": preset.goal,
            "machines": f"{preset.cell.replicas} x {preset.cell.instance_type}",
            "TP": preset.cell.tensor_parallel,
            "concurrency": preset.cell.concurrency,
            "tok/s": _shown(preset.cell.throughput_tokens_per_s, 0),
            "ms/token": _shown(preset.cell.latency_s_per_token, 0, scale=1e3),
            "USD/1M out": _shown(preset.usd_per_1m_output, 2),
        }
        for preset in presets(cells, prices)
    ]
    left = ("model", "in/out", "choose for", "machines")
    print_table("Measured configurations (JumpStart, 2023)", rows, left=left)
    note("measured with TGI of 2023; `recommend` predicts other machines, lengths and engines")


def _shown(value: float | None, digits: int, *, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:,.{digits}f}"
