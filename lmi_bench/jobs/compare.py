"""One comparison from two folders to its table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from lmi_bench.analysis.results.compare import Difference, compare_runs
from lmi_bench.analysis.results.scaling_efficiency import ScalingEfficiency, scaling_efficiency
from lmi_bench.cli.console import note, print_table, say
from lmi_bench.cli.files import write_text
from lmi_bench.core.run_store import load_run
from lmi_bench.report.formats import MISSING, number


def run_compare(a: Path, b: Path, *, json_file: Path | None) -> None:
    """Compare, print and write."""
    first, second = load_run(a), load_run(b)
    differences = compare_runs(first, second)
    scaling = scaling_efficiency(first, second)
    print_table(
        f"{b} against {a}",
        [_row(each) for each in differences],
        left=("metric",),
        whole=("level",),
        give_way=("A", "B"),
    )
    counts = Counter(each.verdict for each in differences)
    say(f"{b} against {a}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if scaling is not None:
        say(_scaling_text(scaling))
    note(
        "intervals: 95 % each, paired bootstrap over requests; verdicts: 95 % for all together "
        "(Holm); runs differ by more than requests do"
    )
    if json_file is not None:
        content = {
            "a": str(a),
            "b": str(b),
            "confidence": 0.95,
            "differences": [each.to_dict() for each in differences],
            "scaling": None if scaling is None else scaling.to_dict(),
        }
        write_text(json_file, json.dumps(content, indent=2) + "\n")


def _scaling_text(scaling: ScalingEfficiency) -> str:
    text = (
        f"{scaling.many} copies give {number(scaling.many_tokens_per_s)} tok/s at their best "
        f"level, {scaling.few} {number(scaling.few_tokens_per_s)}: scaling efficiency "
        f"{scaling.efficiency_frac:.0%} (aggregate / (copies x one copy's))"
    )
    if scaling.edge:
        text += "; a best level is the highest that was run, so more load may change it"
    return text


def _row(each: Difference) -> dict[str, str]:
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
