"""Where the time to first token of a level goes: client, network, server queue, prefill.

The server's part comes from its answers (vLLM's per-request metrics, an engine in this process) or
from its /metrics page, whose histograms give means over the level. What is measured on one clock is
subtracted from what is measured on another, never one clock's reading from the other's, so the
clocks need not agree.
"""

from collections.abc import Sequence
from statistics import fmean

from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.server_metrics import ServerMetrics, TtftSplit
from lmi_bench.core.units import MS_PER_S

MAX_OTHERS_FRAC = 0.02
"""Share by which the server may have counted other requests than ours: its means are then ours."""


def ttft_split(run: LevelRun) -> TtftSplit | None:
    """The parts of the mean TTFT; None where the server states none, or served others too."""
    answered = [
        each for each in run.records if each.ok and each.exchange.streamed and each.token_times_s
    ]
    if not answered:
        return None
    found = _of_answers(answered) or _of_metrics(run.server, len(answered))
    if found is None:
        return None
    queue_ms, prefill_ms, server_ms, source = found
    stated_ms = server_ms - queue_ms if prefill_ms is None else prefill_ms
    known = source == "metrics" and prefill_ms is not None
    ttft_ms = fmean(each.token_times_s[0] - each.sent_s for each in answered) * MS_PER_S
    late_ms = fmean(each.sent_s - each.due_s for each in answered) * MS_PER_S
    return TtftSplit(
        client_ms=late_ms if run.spec.load.is_open else 0.0,
        network_ms=ttft_ms - server_ms,
        queue_ms=queue_ms,
        prefill_ms=stated_ms,
        other_ms=round(server_ms - queue_ms - stated_ms, 6) + 0.0 if known else None,
        bound_ms=run.check.ttft_error_bound_ms,
        requests=len(answered),
        source=source,
    )


_Server = tuple[
    float, float | None, float, str
]  # queue, prefill, what they are part of, ms; source


def _of_answers(answered: Sequence[RequestRecord]) -> _Server | None:
    stages = [
        (exchange.queue_s, exchange.prefill_s)
        for each in answered
        if (exchange := each.exchange).queue_s is not None and exchange.prefill_s is not None
    ]
    if len(stages) < len(answered):
        return None
    queue_ms, prefill_ms = (fmean(each) * MS_PER_S for each in zip(*stages, strict=True))
    return queue_ms, prefill_ms, queue_ms + prefill_ms, "answers"


def _of_metrics(server: ServerMetrics | None, answers: int) -> _Server | None:
    if server is None or server.queue_mean_ms is None or server.ttft_mean_ms is None:
        return None
    if abs((server.first_tokens or 0.0) - answers) > MAX_OTHERS_FRAC * answers:
        return None
    return server.queue_mean_ms, server.prefill_mean_ms, server.ttft_mean_ms, "metrics"
