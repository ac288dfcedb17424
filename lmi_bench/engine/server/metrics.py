"""`/metrics`: the engine's counters and request latencies for Prometheus, under vLLM's names.

Unlike vLLM's, the buckets are 1-2-5 steps. A request enters the histograms when it ends.
"""

from operator import attrgetter

from lmi_bench.engine.server.state import METRICS, ServerState

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(state: ServerState) -> str:
    """The exposition text; `kv_cache_usage_perc` is a fraction from 0 to 1, as in vLLM."""
    label = f'model_name="{_escape(state.model_name)}",engine="0"'
    stats, totals = state.engine.stats(), state.totals
    lines: list[str] = []
    for row in METRICS:
        name = f"vllm:{row['name']}"
        lines += [f"# HELP {name} {row['help']}", f"# TYPE {name} {row['kind']}"]
        if row["kind"] == "histogram":
            lines += totals.histograms[row["name"]].samples(name, label)
        elif row["counts"]:
            lines.append(f"{name}{{{label}}} {attrgetter(row['counts'])(stats):.10g}")
        else:
            for reason, count in sorted(totals.finished.items()):
                lines.append(f'{name}{{{label},finished_reason="{_escape(reason)}"}} {count}')
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    """A label value, escaped for the exposition format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
