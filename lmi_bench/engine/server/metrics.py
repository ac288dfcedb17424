"""`/metrics`: the engine's counters and request latencies for Prometheus, under vLLM's names.

Unlike vLLM's, the buckets are 1-2-5 steps. A request enters the histograms when it ends.
"""

from collections.abc import Iterator

from aiohttp import web

from lmi_bench.engine.server.state import HISTOGRAMS, METRICS, ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_metrics(app: web.Application, state: ServerState) -> None:
    async def metrics(_: web.Request) -> web.Response:
        body = render_metrics(state).encode()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", metrics)


def render_metrics(state: ServerState) -> str:
    """The exposition text; `kv_cache_usage_perc` is a fraction from 0 to 1, as in vLLM."""
    label = f'model_name="{_escape(state.model_name)}",engine="0"'
    lines = [*_engine_lines(state, label), *_request_lines(state, label)]
    return "\n".join(lines) + "\n"


def _engine_lines(state: ServerState, label: str) -> Iterator[str]:
    stats = state.engine.stats()
    for name, value, help_text in (
        ("num_requests_running", stats.running, "Requests in the batch."),
        ("num_requests_waiting", stats.waiting, "Requests in the queue."),
        (
            "kv_cache_usage_perc",
            stats.used_blocks / stats.total_blocks,
            "Used share of the KV blocks, 0 to 1.",
        ),
        *(
            (f"{row['name']}_total", getattr(stats.done, row["counts"]), row["help"])
            for row in METRICS
            if row["counts"]
        ),
    ):
        yield from _head(name, "counter" if name.endswith("_total") else "gauge", help_text)
        yield f"vllm:{name}{{{label}}} {value:.10g}"


def _request_lines(state: ServerState, label: str) -> Iterator[str]:
    totals = state.totals
    yield from _head("request_success_total", "counter", "Requests that ended, by reason.")
    for reason, count in sorted(totals.finished.items()):
        yield f'vllm:request_success_total{{{label},finished_reason="{_escape(reason)}"}} {count}'
    for name, help_text in HISTOGRAMS.items():
        yield from _head(name, "histogram", help_text)
        yield from totals.histograms[name].samples(f"vllm:{name}", label)


def _head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP vllm:{name} {help_text}", f"# TYPE vllm:{name} {kind}"


def _escape(value: str) -> str:
    """A label value, escaped for the exposition format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
