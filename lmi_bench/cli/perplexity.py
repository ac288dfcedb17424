"""`lmi-bench perplexity`: how well a model knows a text, by the length that it reads at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.perplexity import PerplexitySettings

if TYPE_CHECKING:
    from lmi_bench.jobs.perplexity import Perplexities


@spread_options
def perplexity(
    settings: PerplexitySettings,
    json_file: Annotated[Path | None, Option("File for the figures.", ("--json",))] = None,
) -> None:
    """Perplexity of a text by the length read at once, with and without RoPE scaling.

    The text is cut into windows of each length, and each window is scored alone. A longer window
    lowers the perplexity of a model that knows its positions. It may raise that of a model whose
    positions are stretched beyond its training, which its speed does not show.
    """
    from lmi_bench.cli.console import terminal, write_json
    from lmi_bench.jobs.perplexity import perplexity as run

    with terminal() as listener:
        found = run(settings, listener)
    _print(found)
    write_json(json_file, found.to_json())


def _print(found: Perplexities) -> None:
    from lmi_bench.cli.console import note, print_table
    from lmi_bench.jobs.perplexity import AS_TRAINED
    from lmi_bench.report.formats import MISSING, number

    rows = []
    for length in found.lengths:
        cells = {"tokens at once": f"{length:,}"}
        for scaling, scores in found.scores.items():
            at = scores.get(length)
            name = scaling or AS_TRAINED
            cells[f"{name}: all"] = MISSING if at is None else number(at.perplexity, 4)
            cells[f"{name}: 2nd half"] = MISSING if at is None else number(at.far_perplexity, 4)
        rows.append(cells)
    print_table(
        f"Perplexity of {found.settings.model}, which knows {found.max_positions:,} positions",
        rows,
    )
    if any(length not in scores for scores in found.scores.values() for length in found.lengths):
        note(
            f"{MISSING}: longer than the text, or than the positions that the model knows; "
            "--rope-scaling stretches them"
        )
