"""Where the time to first token of a level goes: client, network, server queue, prefill.

The server's part comes from its answers (vLLM's per-request metrics, an engine in this process) or
from its /metrics page, whose histograms give means over the level. What is measured on one clock is
subtracted from what is measured on another, never one clock's reading from the other's, so the
clocks need not agree.
"""

import numpy as np

from lmi_bench.analysis.results.columns import Columns
from lmi_bench.core.records import LevelRun
from lmi_bench.core.server_metrics import ServerMetrics, TtftSplit
from lmi_bench.core.units import MS_PER_S

MAX_OTHERS_FRAC = 0.02
"""Largest difference of the server's number of first tokens from ours, as a share. With a larger
one others use the server, and its means are not those of our requests."""

_Server = tuple[float, float | None, float, str]
"""Queue, prefill (None: not stated) and the whole that they are part of, ms; the source."""


def ttft_split(run: LevelRun, columns: Columns) -> TtftSplit | None:
    """The parts of the mean TTFT; None where the server states none, or served others too."""
    ttft_s, rows = columns.values_s("ttft_from_sent", open_loop=False, counted_only=False)
    if not ttft_s.size:
        return None
    found = _of_answers(run, rows.tolist()) or _of_metrics(run.server, ttft_s.size)
    if found is None:
        return None
    queue_ms, stated_ms, server_ms, source = found
    prefill_ms = server_ms - queue_ms if stated_ms is None else stated_ms
    known = source == "metrics" and stated_ms is not None
    late_s = (columns.sent_s - columns.due_s)[rows] if run.spec.load.is_open else np.zeros(1)
    return TtftSplit(
        client_ms=float(late_s.mean()) * MS_PER_S,
        network_ms=float(ttft_s.mean()) * MS_PER_S - server_ms,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        other_ms=round(server_ms - queue_ms - prefill_ms, 6) + 0.0 if known else None,
        bound_ms=run.check.ttft_error_bound_ms,
        requests=ttft_s.size,
        source=source,
    )


def _of_answers(run: LevelRun, rows: list[int]) -> _Server | None:
    exchanges = [run.records[row].exchange for row in rows]
    stages_s = np.array([(each.queue_s, each.prefill_s) for each in exchanges], dtype=float)
    queue_ms, prefill_ms = (stages_s.mean(axis=0) * MS_PER_S).tolist()
    whole_ms = queue_ms + prefill_ms  # not a number where an answer states none
    return (queue_ms, prefill_ms, whole_ms, "answers") if whole_ms >= 0 else None


def _of_metrics(server: ServerMetrics | None, answers: int) -> _Server | None:
    if server is None or server.queue_mean_ms is None or server.ttft_mean_ms is None:
        return None
    if abs((server.first_tokens or 0.0) - answers) > MAX_OTHERS_FRAC * answers:
        return None
    return server.queue_mean_ms, server.prefill_mean_ms, server.ttft_mean_ms, "metrics"
