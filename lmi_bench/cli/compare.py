"""`lmi-bench compare`: two runs level by level, and whether they differ beyond chance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.compare import CompareSettings

if TYPE_CHECKING:
    from lmi_bench.analysis.results.compare import Difference, ScalingEfficiency
    from lmi_bench.jobs.compare import Comparison


@spread_options
def compare(
    settings: CompareSettings,
    json_file: Annotated[Path | None, Option("File for the differences.", ("--json",))] = None,
) -> None:
    """Compare two runs of one workload level by level: faster, slower or no difference.

    Intervals are 95 % by paired bootstrap over requests. Unlike workloads are refused.
    """
    from lmi_bench.cli.console import write_json
    from lmi_bench.jobs.compare import compare as run

    comparison = run(settings)
    _print(comparison)
    write_json(json_file, comparison.to_json())


def _print(comparison: Comparison) -> None:
    from lmi_bench.cli.console import note, print_table, say

    title = f"{comparison.b} against {comparison.a}"
    print_table(
        title,
        [_row(each) for each in comparison.differences],
        left=("metric",),
        whole=("level",),
        give_way=("A", "B"),
    )
    counts = Counter(each.verdict for each in comparison.differences)
    say(f"{title}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if comparison.scaling is not None:
        say(_scaling_text(comparison.scaling))
    note(
        "intervals: 95 % each, paired bootstrap over requests; verdicts: 95 % for all together "
        "(Holm); runs differ by more than requests do"
    )


def _scaling_text(scaling: ScalingEfficiency) -> str:
    from lmi_bench.report.formats import number

    text = (
        f"{scaling.many} copies give {number(scaling.many_tokens_per_s)} tok/s at their best "
        f"level, {scaling.few} {number(scaling.few_tokens_per_s)}: scaling efficiency "
        f"{scaling.efficiency_frac:.0%} (aggregate / (copies x one copy's))"
    )
    if scaling.edge:
        text += "; a best level is the highest that was run, so more load may change it"
    return text


def _row(each: Difference) -> dict[str, str]:
    from lmi_bench.report.formats import MISSING, number

    known = each.change is not None and each.low is not None and each.high is not None
    return {
        "level": each.level,
        "metric": f"{each.metric}, {each.unit}",
        "A": number(each.a),
        "B": number(each.b),
        "change": f"{each.change:+.1%}" if known else MISSING,
        "95 %": f"{each.low:+.1%} to {each.high:+.1%}" if known else each.reason,
        "verdict": each.verdict,
    }
