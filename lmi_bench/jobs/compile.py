"""One compilation, from the settings to its table."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lmi_bench.cli.console import note, print_table, say
from lmi_bench.core.scenario import EngineSection
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.parts import close_all


def run(model: str, settings: EngineSection, out: Path) -> None:
    """Compile, compare, print. Raises InputError for what cannot be compiled."""
    parts = open_torch_engine(model, settings, compile_into=out)
    for line in parts.notes:
        note(line)
    assert parts.compare is not None

    async def compare() -> None:
        try:
            differences = await parts.compare()  # type: ignore[misc]
        finally:
            await close_all(parts.executors)
        rows = [
            {
                "sequences": f"{each.shape.sequences}",
                "context tokens": f"{each.shape.context_tokens:,}",
                "largest logit difference": f"{each.largest:.2g}",
                "of logits' spread": f"{each.largest / each.spread:.1%}" if each.spread else "",
                "same likeliest token": f"{each.same_frac:.0%}",
            }
            for each in differences
        ]
        print_table("Compiled steps against eager ones, random contexts", rows)

    asyncio.run(compare())
    say(f"compiled steps: {out}   use them with: --artefact {out}")
