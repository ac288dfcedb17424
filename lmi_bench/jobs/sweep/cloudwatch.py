"""CloudWatch after a sweep: wait until its minutes are in, keep what it says of each level."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lmi_bench.cli.console import note
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.loadgen.aws.cloudwatch import LevelSpan, level_spans
from lmi_bench.targets.bench import Bench

DEFAULT_WAIT_S = 120.0
"""Values of a minute come one to two minutes after it."""
_ASK_EVERY_S = 15.0


def read_cloudwatch(
    bench: Bench, lines: Sequence[Mapping[str, Any]], *, wait_s: float = DEFAULT_WAIT_S
) -> list[dict[str, Any]]:
    """What CloudWatch says of the levels; empty where there is none or it may not be read.

    wait_s  at most, until it has counted as many invocations as were sent. Ctrl-C ends the wait
    """
    spans = level_spans(lines)
    if bench.cloudwatch is None or not spans:
        return []
    sent = sum(line["requests"] for line in lines if line.get("started_at"))
    end_s = time.monotonic() + wait_s
    found: list[dict[str, Any]] = []
    try:
        found = _ask(bench, spans)
        if wait_s and _counted(found) < sent:
            note(f"waiting up to {wait_s:.0f} s for CloudWatch's minutes (Ctrl-C leaves them out)")
        while _counted(found) < sent and time.monotonic() < end_s:
            time.sleep(min(_ASK_EVERY_S, max(0.0, end_s - time.monotonic())))
            found = _ask(bench, spans)
    except KeyboardInterrupt:
        note("CloudWatch is left as far as it came")
    except LmiBenchError as exc:
        note(f"{exc}; the levels are without it")
        return []
    if not any("invocations" in level for level in found):
        note("CloudWatch has no invocations of these minutes; the levels are without it")
        return []
    if _counted(found) < sent:
        note(f"CloudWatch had counted {_counted(found):.0f} of {sent} invocations when read")
    return found


def _ask(bench: Bench, spans: Sequence[LevelSpan]) -> list[dict[str, Any]]:
    assert bench.cloudwatch is not None
    return bench.cloudwatch(spans)


def _counted(levels: Sequence[Mapping[str, Any]]) -> float:
    """Invocations of all levels; a minute that two share counts for both and ends a wait early."""
    return float(sum(level.get("invocations", 0.0) for level in levels))
