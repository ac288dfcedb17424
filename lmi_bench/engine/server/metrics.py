"""`/metrics`: the engine's counts in Prometheus text, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from lmi_bench.engine.server.state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(state: ServerState) -> str:
    """The exposition text; `kv_cache_usage_perc` is a fraction from 0 to 1, as in vLLM."""
    stats = state.engine.stats()
    label = f'model_name="{_escape(state.model_name)}",engine="0"'
    lines = [
        *_metric("num_requests_running", "gauge", "Requests in the batch.", label, stats.running),
        *_metric("num_requests_waiting", "gauge", "Requests in the queue.", label, stats.waiting),
        *_metric(
            "kv_cache_usage_perc",
            "gauge",
            "Share of the KV blocks in use, 0 to 1.",
            label,
            stats.used_blocks / stats.total_blocks,
        ),
        *_metric("num_preemptions", "counter", "Preemptions.", label, stats.preemptions),
        *_metric("prompt_tokens", "counter", "Prompt tokens computed.", label, stats.prompt_tokens),
        *_metric(
            "generation_tokens", "counter", "Tokens generated.", label, stats.generation_tokens
        ),
        "# HELP vllm:request_success Requests that ended, by reason.",
        "# TYPE vllm:request_success counter",
        *(
            f'vllm:request_success_total{{{label},finished_reason="{_escape(reason)}"}} {count}'
            for reason, count in sorted(state.finished.items())
        ),
    ]
    return "\n".join(lines) + "\n"


class MetricsRoute:
    """Handler over one served model."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def add_to(self, app: web.Application) -> None:
        """Register the route."""
        app.router.add_get("/metrics", self.metrics)

    async def metrics(self, request: web.Request) -> web.Response:
        """The counts at this moment."""
        body = render_metrics(self._state).encode()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _metric(name: str, kind: str, help_text: str, label: str, value: float) -> Iterable[str]:
    suffix = "_total" if kind == "counter" else ""
    return (
        f"# HELP vllm:{name} {help_text}",
        f"# TYPE vllm:{name} {kind}",
        f"vllm:{name}{suffix}{{{label}}} {value:.10g}",
    )


def _escape(value: str) -> str:
    """A label value, quoted as the exposition format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
