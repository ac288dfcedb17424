"""A run as plain text: a block to paste in an issue, lines for the console, and Markdown."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Literal, cast

from lmi_bench.catalog.tables import Row
from lmi_bench.core.level import Level, Metric
from lmi_bench.core.server_metrics import ServerMetrics
from lmi_bench.report.formats import MISSING, count, number, share, statistic_cell
from lmi_bench.report.table import Table
from lmi_bench.report.tables.levels import COLUMNS, TTFT_PARTS, level_state, load_item
from lmi_bench.report.values import ReportView

_WIDTH = 62
_STATISTICS = (("mean", "Mean"), ("p50", "P50"), ("p90", "P90"), ("p99", "P99"))


def replica_lines(levels: Sequence[Level]) -> list[str]:
    """Requests of each replica, a line for each level with several replicas."""
    lines = []
    for line in levels:
        server = line.server or ServerMetrics()
        shares: Mapping[str, float | None] = line.requests_by_replica or server.requests_by_replica or {}
        if shares:
            text = ", ".join(f"{name}: {MISSING if n is None else f'{n:g}'}" for name, n in shares.items())
            text += "" if server.skew is None else f"; busiest {server.skew:.2f} times the mean"
            lines.append(f"requests by replica at {line.name}: {text}")
    return lines


def level_block(line: Level) -> str:
    """One level as the usual benchmark block, to paste in an issue."""
    rows: list[tuple[str, str]] = [(f"{name}:", value) for name, value in load_item(line).items() if value != MISSING]
    rows += [
        ("Completed requests:", count(line.completed)),
        ("Failed requests:", count(line.errors)),
        ("Wall time (s):", number(line.wall_s, 4)),
        ("Input tokens:", count(line.input_tokens)),
        ("Output tokens:", count(line.output_tokens)),
        ("Request throughput (req/s):", number(line.request_throughput_per_s, 4)),
        ("Output token throughput (tok/s):", number(line.throughput_tokens_per_s, 4)),
        ("Total token throughput (tok/s):", number(line.total_throughput_tokens_per_s, 4)),
        *_own_rows(line),
        ("Mean concurrency:", number(line.mean_concurrency, 4)),
        ("State:", level_state(line).text),
    ]
    text = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    text += [_row(name, value) for name, value in rows]
    for row in COLUMNS:
        if row["of"] == "block" and _has_section(line, row):
            found = line.of(cast("Metric", row["key"]))
            text.append(f" {row['title']} ".center(_WIDTH, "-"))
            text += [
                _row(f"{shown} {row['console']}:", statistic_cell(found, name, 4).text) for name, shown in _STATISTICS
            ]
    text.append("=" * _WIDTH)
    return "\n".join(text)


def _has_section(line: Level, row: Row) -> bool:
    """Whether a level's block has a latency; an embedding has an end alone."""
    metric = cast("Metric", row["key"])
    if line.is_tokenless and not line.of(metric).n:
        return False
    if row["group"]:  # from the send
        return line.load.is_open and "ttft_from_sent" in line.latency
    return metric != "ttft_answer" or metric in line.latency  # TTFT counts reasoning tokens


def _own_rows(line: Level) -> Iterator[tuple[str, str]]:
    """Throughput as published price tables compute it, and the share of reasoning tokens."""
    gap_ms, users = line.of("itl").p50, line.load.concurrency
    if gap_ms and users is not None:  # right only while no request waits
        yield "Concurrency / P50 ITL (tok/s):", number(1e3 * users / gap_ms, 4)
    if line.reasoning_token_share is not None:
        yield "Reasoning tokens, of all output:", share(line.reasoning_token_share)


_BOUNDED: tuple[Literal["ttft", "itl"], ...] = ("ttft", "itl")
_CLOCKS = {"kernel": "kernel time", "user": "user time", "loop": "the event loop's clock"}


def generator_line(lines: Sequence[Level]) -> str | None:
    """The error bounds of the times over all levels, in one line; None if none is known."""
    checks = [line.generator for line in lines]
    parts = []
    for name in _BOUNDED:
        known = [(bound, frac) for check in checks for bound, frac in [check.p99_bound(name)] if bound is not None]
        if known:
            worst_ms, worst_frac = max(known, key=lambda pair: pair[1] or 0.0)
            text = f"{name.upper()} p99 at most {number(worst_ms)} ms ({(worst_frac or 0.0):.2%})"
            if len(known) < len(checks):
                text += f" where known, {len(known)} of {len(checks)} levels"
            parts.append(text)
    if not parts:
        return None
    clocks = ", ".join(sorted({_CLOCKS.get(clock := str(one.timestamps), clock) for one in checks}))
    readers = ", ".join(sorted({check.receiver for check in checks if check.receiver}))
    receiver = f", {readers} receiver" if readers else ""
    apart_ms = max((check.clock_error_bound_ms or 0.0 for check in checks), default=0.0)
    if apart_ms:  # of the hosts; a latency is a difference on one of them and has no such error
        receiver += f"; the workers' clocks agree within {number(apart_ms)} ms"
    return f"the generator's own error: {', '.join(parts)}; {clocks}{receiver}"


def ttft_parts_line(lines: Sequence[Level]) -> str | None:
    """Where the TTFT of the highest level goes, the largest part first; None if it is not known."""
    if not lines or (split := lines[-1].ttft_split) is None:
        return None
    parts = [(getattr(split, key), title) for key, title in TTFT_PARTS.items()]
    known = sorted((part for part in parts if part[0]), reverse=True)
    whole_ms = sum(ms for ms, _ in known)
    shares = ", ".join(f"{ms / whole_ms:.0%} {title}" for ms, title in known)
    return f"where TTFT goes at {lines[-1].name} (mean {number(whole_ms)} ms): {shares}"


_COUNTED_BY = {
    "server": "the server's own",
    "tokenizer": "the model's tokenizer, where the server states none",
    "chunks": "chunks, where the server states none and no tokenizer is at hand",
}


def token_counts_line(lines: Sequence[Level]) -> str | None:
    """The origin of the token counts over all levels; None if no endpoint stated it."""
    stated = [line.generator.token_counts for line in lines]
    names = dict.fromkeys(name for text in stated if text for name in text.split(", "))
    if not names:
        return None
    return f"token counts: {'; '.join(_COUNTED_BY.get(name, name) for name in names)}"


def render_markdown(view: ReportView) -> str:
    """The report as Markdown, for a pull request, an issue or a wiki."""
    import jinja2

    environment = jinja2.Environment(  # noqa: S701  `line` escapes what Markdown would take as its own
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"line": _line, "grid": _grid}
    source = (files("lmi_bench.report") / "page" / "report.md.j2").read_text("utf-8")
    text = environment.from_string(source).render(view=view)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _grid(table: Table) -> str:
    """A table as Markdown; a column's title begins with its group."""
    titles = [f"{column.group} {column.title}" if column.group else column.title for column in table.columns]
    rules = ["---:" if column.numeric else "---" for column in table.columns]
    lines = [titles, rules, *([cell.text for cell in row.cells] for row in table.rows)]
    return "\n".join("| " + " | ".join(_line(text) for text in line) + " |" for line in lines)


def _row(name: str, value: str) -> str:
    return f"{name:<42}{value:>{_WIDTH - 42}}"


def _line(text: str) -> str:
    for old, new in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\r", " "), ("\n", " ")):
        text = text.replace(old, new)
    return text
