"""A run as plain text: a block to paste in an issue, Markdown, and rows for the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.results.checks import level_name
from lmi_bench.analysis.results.knee import Knee
from lmi_bench.analysis.results.latency import ANSWER_KEY
from lmi_bench.core.units import format_figure
from lmi_bench.report.formats import MISSING, NOT_SUPPORTED, count, number, plain, share
from lmi_bench.report.values import ReportView, RunView, Table

_WIDTH = 62
_SECTIONS = (
    ("Time to first token", "ttft_ms", "TTFT (ms)"),
    ("Inter-token latency", "itl_ms", "ITL (ms)"),
    ("Time per output token", "tpot_ms", "TPOT (ms)"),
    ("End-to-end latency", "e2e_ms", "E2E (ms)"),
    ("Latency per token", "latency_ms_per_token", "Latency (ms/token)"),
)
_FROM_SENT = (
    ("Time to first token, from the send", "ttft_from_sent_ms", "TTFT from sent (ms)"),
    ("End-to-end latency, from the send", "e2e_from_sent_ms", "E2E from sent (ms)"),
    ("Dispatch delay: sent after due", "dispatch_delay_ms", "delay (ms)"),
)
_STATISTICS = (("mean", "Mean"), ("p50", "P50"), ("p90", "P90"), ("p99", "P99"))


LEVEL_GIVE_WAY = ("ms/token mean", "ITL ms p99", "TTFT ms mean", "ITL ms p50")
"""Columns of `level_rows` that a narrow terminal does without; errors and state always stay."""


def level_rows(levels: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The levels as console rows, all with the same keys.

    Concurrent requests | throughput | latency ms/token | TTFT | ITL | errors
    """
    return [
        {
            **_load(line),
            "tok/s": number(line.get("throughput_tokens_per_s")),
            "ms/token mean": _statistic(line, "latency_ms_per_token", "mean"),
            "ms/token p90": _statistic(line, "latency_ms_per_token", "p90"),
            "TTFT ms mean": _statistic(line, "ttft_ms", "mean"),
            "TTFT ms p90": _statistic(line, "ttft_ms", "p90"),
            "ITL ms p50": _statistic(line, "itl_ms", "p50"),
            "ITL ms p99": _statistic(line, "itl_ms", "p99"),
            "errors": f"{line.get('errors', 0)}/{line.get('requests', 0)}",
            "state": _state(line),
        }
        for line in levels
    ]


def session_rows(levels: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Conversations as console rows, a level each; none where requests stood alone."""
    return [
        {
            "level": level_name(line),
            "conversations": count(found["started"]),
            "failed": count(found["failed"]),
            "turns mean": number(found["turns_mean"]),
            "TTFT ms first turn mean": _statistic(found, "ttft_first_turn_ms", "mean"),
            "first turn p90": _statistic(found, "ttft_first_turn_ms", "p90"),
            "TTFT ms later turns mean": _statistic(found, "ttft_later_turns_ms", "mean"),
            "later turns p90": _statistic(found, "ttft_later_turns_ms", "p90"),
        }
        for line in levels
        if (found := line.get("sessions"))
    ]


def replica_lines(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the requests of each level were shared out among replicas, where there are several."""
    lines = []
    for line in levels:
        server = line.get("server") or {}
        shares = line.get("requests_by_replica") or server.get("requests_by_replica")
        if shares:
            text = ", ".join(
                f"{name}: {MISSING if n is None else f'{n:g}'}" for name, n in shares.items()
            )
            skew = server.get("skew")
            text += "" if skew is None else f"; busiest {skew:.2f} times the mean"
            lines.append(f"requests by replica at {level_name(line)}: {text}")
    return lines


def engine_rows(levels: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What the engine did as console rows, a level each, where the target's engine is in sight.

    Columns of what happened in no level are left out.
    """
    seen = [line for line in levels if line.get("engine")]
    wanted = [
        (title, key, shown, always)
        for title, key, shown, always in _ENGINE_COLUMNS
        if always or any(line["engine"].get(key) for line in seen)
    ]
    return [
        {"level": level_name(line)}
        | {
            title: MISSING if (value := line["engine"].get(key)) is None else shown(value)
            for title, key, shown, _ in wanted
        }
        for line in seen
    ]


# heading, key in `level.engine`, how it is shown, whether it is shown where all of it is 0
_ENGINE_COLUMNS: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
    ("most sequences so far", "peak_running", count, True),
    ("idle decode slots", "slot_waste_frac", share, True),
    ("empty reserved token slots", "cache_waste_frac", share, True),
    ("preemptions", "preemptions", count, False),
    ("batches anew", "rebuilt_batches", count, False),
    ("prompt tokens cached", "prefix_hit_frac", share, False),
    ("drafted tokens held", "draft_acceptance_frac", share, False),
    ("tokens a step", "tokens_per_decode", "{:.2f}".format, False),
)


def knee_rows(knees: Sequence[Knee | Mapping[str, Any]]) -> list[dict[str, str]]:
    """The knees, found now or read from knees.json, as console rows; a star recommends."""
    rows = []
    for each in knees:
        knee = each.to_dict() if isinstance(each, Knee) else each
        axis = str(knee.get("axis") or "concurrency")
        value, low, high = knee.get(axis), knee.get("low"), knee.get("high")
        unit = "" if axis == "concurrency" else " req/s"
        rows.append(
            {
                "rule": f"{knee.get('rule')}{' *' if knee.get('recommended') else ''}",
                "knee": MISSING if value is None else f"{format_figure(value)}{unit}",
                "interval": (
                    MISSING
                    if low is None or high is None
                    else f"{format_figure(low)} to {format_figure(high)}"
                ),
                "cause": str(knee.get("cause") or "unknown"),
                "why": str(knee.get("why") or ""),
            }
        )
    return rows


def level_block(line: Mapping[str, Any]) -> str:
    """One level as the block that people know from issues."""
    rows: list[tuple[str, str]] = [
        (f"{name}:", value) for name, value in _load(line).items() if value != MISSING
    ]
    rows += [
        ("Completed requests:", count((line.get("requests") or 0) - (line.get("errors") or 0))),
        ("Failed requests:", count(line.get("errors"))),
        ("Wall time (s):", number(line.get("wall_s"), 4)),
        ("Input tokens:", count(line.get("input_tokens"))),
        ("Output tokens:", count(line.get("output_tokens"))),
        ("Request throughput (req/s):", number(line.get("request_throughput_per_s"), 4)),
        ("Output token throughput (tok/s):", number(line.get("throughput_tokens_per_s"), 4)),
        ("Total token throughput (tok/s):", number(line.get("total_throughput_tokens_per_s"), 4)),
        *_by_gaps(line),
        *_of_reasoning(line),
        ("Mean concurrency:", number(line.get("mean_concurrency"), 4)),
        ("State:", _state(line)),
    ]
    text = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    text += [_row(name, value) for name, value in rows]
    for title, key, short in (*_SECTIONS, *_of_due_times(line), *_of_answers(line)):
        text.append(f" {title} ".center(_WIDTH, "-"))
        text += [
            _row(f"{shown} {short}:", _statistic(line, key, name, 4)) for name, shown in _STATISTICS
        ]
    text.append("=" * _WIDTH)
    return "\n".join(text)


def _of_due_times(line: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """In an open loop latencies count from when a request was due; what lies between is its own."""
    if line.get("concurrency") is not None or not line.get("ttft_from_sent_ms"):
        return ()
    return _FROM_SENT


def _of_answers(line: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """Where a server thinks aloud, TTFT counts its thoughts and this does not."""
    if not line.get(ANSWER_KEY):
        return ()
    return (("Time to first token of the answer", ANSWER_KEY, "TTFT of the answer (ms)"),)


def _of_reasoning(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = line.get("reasoning_token_share")
    return [] if found is None else [("Reasoning tokens, of all output:", share(found))]


def _by_gaps(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What published price tables take for the throughput: right only while nobody waits."""
    gap_ms = (line.get("itl_ms") or {}).get("p50")
    if not gap_ms or line.get("concurrency") is None:
        return []
    return [("Concurrency / P50 ITL (tok/s):", number(1e3 * line["concurrency"] / gap_ms, 4))]


_CLOCKS = {"kernel": "kernel time", "user": "user time", "loop": "the event loop's clock"}


def generator_line(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """How true the times are, in one line over all levels; None where nothing is known of it."""
    checks = [line.get("generator") or {} for line in lines]
    parts = []
    for name, title in (("ttft", "TTFT p99"), ("itl", "ITL p99")):
        bounds = [check.get(f"{name}_error_bound_ms") for check in checks]
        shares = [check.get(f"{name}_error_bound_frac") for check in checks]
        known = [
            (bound, frac) for bound, frac in zip(bounds, shares, strict=True) if bound is not None
        ]
        if known:
            worst_ms, worst_frac = max(known, key=lambda pair: pair[1] or 0.0)
            text = f"{title} at most {number(worst_ms)} ms ({(worst_frac or 0.0):.2%})"
            if len(known) < len(checks):
                text += f" where known, {len(known)} of {len(checks)} levels"
            parts.append(text)
    if not parts:
        return None
    clocks = ", ".join(
        sorted({_CLOCKS.get(clock := str(check.get("timestamps")), clock) for check in checks})
    )
    readers = ", ".join(
        sorted({str(check["receiver"]) for check in checks if check.get("receiver")})
    )
    told = f", {readers} receiver" if readers else ""
    return f"the generator's own error: {', '.join(parts)}; {clocks}{told}"


_COUNTED_BY = {
    "server": "the server's own",
    "tokenizer": "the model's tokenizer, where the server states none",
    "chunks": "chunks, where the server states none and no tokenizer is at hand",
}


def token_counts_line(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Who counted the tokens of answers, over all levels; None where no endpoint gave them."""
    stated = [(line.get("generator") or {}).get("token_counts") for line in lines]
    names = dict.fromkeys(name for text in stated if text for name in text.split(", "))
    if not names:
        return None
    return f"token counts: {'; '.join(_COUNTED_BY.get(name, name) for name in names)}"


def render_markdown(view: ReportView) -> str:
    """The report as Markdown: for a pull request, an issue, a wiki."""
    parts = [f"# {_line(view.title)}", f"lmi-bench {view.version}, {view.generated_at}"]
    for table in view.tables:
        parts += [f"## {_line(table.caption)}", table_markdown(table), table.note]
    for run in view.runs:
        parts += _run_markdown(run)
    if view.comparison is not None:
        parts += ["## Side by side", table_markdown(view.comparison), view.comparison.note]
    for advice in view.recommendations:
        parts += [f"## {_line(advice.title)}", advice.subtitle]
        parts.append(f"**{advice.headline.label}: {_line(advice.headline.value)}**, "
                     f"{advice.headline.detail}")  # fmt: skip
        if advice.candidates is not None:
            parts.append(table_markdown(advice.candidates))
        parts += [f"- {group.count} rejected: {_line(group.reason)}" for group in advice.rejected]
    parts.append("## Definitions")
    parts.append(
        "\n".join(f"- **{each.title}** = {each.formula}" for each in view.definitions if each.unit)
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def table_markdown(table: Table) -> str:
    """A table of the report as Markdown; groups of columns go into their titles."""
    titles = [
        f"{column.group} {column.title}" if column.group else column.title
        for column in table.columns
    ]
    rules = ["---:" if column.numeric else "---" for column in table.columns]
    lines = [titles, rules, *([cell.text for cell in row.cells] for row in table.rows)]
    return "\n".join("| " + " | ".join(_line(text) for text in line) + " |" for line in lines)


def _run_markdown(run: RunView) -> list[str]:
    headlines = "\n".join(
        f"- {each.label}: **{' '.join(part for part in (each.value, each.unit) if part)}**, "
        f"{each.detail}"
        for each in run.headlines
    )
    predicted = "Predicted by the step-time model; nothing was measured." if run.simulated else ""
    parts = [f"## {_line(run.label)}", _line(run.subtitle), predicted, headlines]
    parts += [f"> warning: {_line(warning)}" for warning in run.warnings]
    parts += [table_markdown(run.levels), table_markdown(run.knees)]
    if run.slos is not None:
        parts.append(table_markdown(run.slos))
    for table in run.more:
        parts += [f"### {_line(table.caption)}", table_markdown(table)]
    return parts


def _load(line: Mapping[str, Any]) -> dict[str, str]:
    if line.get("concurrency") is not None:
        return {"Concurrent requests": plain(line["concurrency"])}
    title = "Sessions begun a second" if line.get("sessions") else "Request rate (req/s)"
    return {title: plain(line.get("rate_per_s"))}


def _statistic(line: Mapping[str, Any], key: str, name: str, digits: int = 3) -> str:
    statistics = line.get(key) or {}
    if statistics.get(name) is not None:
        return number(float(statistics[name]), digits)
    return NOT_SUPPORTED if name in (statistics.get("unsupported") or {}) else MISSING


def _state(line: Mapping[str, Any]) -> str:
    if not line.get("valid", True):
        return "invalid"
    return f"stopped: {line['stopped_by']}" if line.get("stopped_by") else "valid"


def _row(name: str, value: str) -> str:
    return f"{name:<42}{value:>{_WIDTH - 42}}"


def _line(text: str) -> str:
    """Text that stays in its cell."""
    for old, new in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\r", " "), ("\n", " ")):
        text = text.replace(old, new)
    return text
