"""The server's own metrics of a level, scraped before, during and after it.

A separate thread scrapes, so the sending loop never waits for it. The first scrapes of a level are
close together and later ones a second apart, so that short levels are covered too. A file of the
server's OpenTelemetry spans takes the place of a page: it is read before and after the level, when
nothing more is written to it.
"""

import asyncio
import contextlib
import http.client
import ssl
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.server_metrics import ServerMetrics
from lmi_bench.core.units import MS_PER_S
from lmi_bench.loadgen.ask.probe import Probe
from lmi_bench.loadgen.watch.machine import GpuPower, HostCpu
from lmi_bench.loadgen.watch.server_metrics import ServerSample, growth, read_page, read_spans

EVERY_S = 1.0
FIRST_S = 0.05  # time to the first scrape within a level, s; each interval doubles, up to EVERY_S
TIMEOUT_S = 2.0
EXPORT_S, MOST_EXPORT_S = 7.0, 30.0
"""Seconds without news after which a file has every span that had ended: exporters send every five,
collectors write after one more. And the longest wait, where others' requests never end."""
MAX_PREFIX_HIT_RATE = 0.01
"""Maximum share of prompt tokens from a prefix cache; a higher one lowers the TTFT noticeably."""
MAX_SKEW = 1.2
"""Maximum ratio of the busiest replica's requests to the mean; beyond it the load is uneven."""


@dataclass(slots=True)
class _Replica:
    """One server and its scrapes of a level: before it, within it and after it.

    scrapes  each with the time since the previous one, s; None: that one failed
    """

    url: str
    scrapes: list[tuple[float, ServerSample | None]] = field(default_factory=list)

    @property
    def grown(self) -> dict[str, float]:
        """Growth of the counters from the first scrape to the last; empty if one of them failed."""
        before, after = self.scrapes[0][1], self.scrapes[-1][1]
        return {} if before is None or after is None else growth(before, after)


@dataclass(eq=False)
class ServerWatch:
    """Watches `/metrics` of one server or of each replica, level after level.

    urls     addresses of the metrics pages, or paths of OTLP/JSON files of spans; empty if only this
             machine is watched
    headers  HTTP headers of each scrape
    power    meter of the accelerators in this machine
    context  certificates to accept; None: the system's
    cpu      meter of this machine's CPU time
    shares_prefixes  prompts share prefixes on purpose, so prefix cache hits are expected
    """

    urls: Sequence[str]
    _: KW_ONLY
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    context: ssl.SSLContext | None = None
    every_s: float = EVERY_S
    power: GpuPower | None = None
    cpu: HostCpu | None = None
    shares_prefixes: bool = False

    def __post_init__(self) -> None:
        self._replicas: list[_Replica] = []
        self._failed: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    async def begin(self) -> None:
        """Scrape once, then repeatedly until `end`."""
        self._replicas = [_Replica(url) for url in self.urls]
        self._failed = {}
        self._stop = threading.Event()
        if self.power is not None:
            self.power.reset()
        if self.cpu is not None:
            self.cpu.reset()
        await asyncio.to_thread(self._scrape_when_exported)
        self._thread = threading.Thread(target=self._watch, args=(self._stop,), daemon=True)
        self._thread.start()

    async def end(self) -> None:
        """Scrape for the last time, also after a failed level."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        await asyncio.to_thread(thread.join)
        self._stop = threading.Event()
        if self.cpu is not None:
            self.cpu.read()
        await asyncio.to_thread(self._scrape_when_exported)

    def abandon(self) -> None:
        """Stop without a last scrape: the level was cancelled."""
        self._stop.set()
        self._thread = None

    def summary(self, records: Sequence[RequestRecord]) -> ServerMetrics | None:
        """The summary of the level; None if there is nothing to report."""
        found: dict[str, Any] = {}
        scraped = [each for each in self._replicas if each.scrapes[0][1] and each.scrapes[-1][1]]
        if scraped:
            found |= _of_servers(scraped, records, expects_hits=self.shares_prefixes)
        if self._failed:
            found["unreachable"] = dict(self._failed)
        taken_frac = None if self.cpu is None else self.cpu.taken_frac()
        if taken_frac is not None:
            found["cpu_taken_frac"] = taken_frac
        metrics = ServerMetrics.from_json(found, "server") if found else None
        if self.power is None:
            return metrics
        tokens = sum(record.output_tokens for record in records if record.ok)
        return replace(metrics or ServerMetrics(), power=self.power.summary(tokens))

    def _watch(self, stop: threading.Event) -> None:
        wait_s = min(FIRST_S, self.every_s)
        while not stop.wait(wait_s):
            self._scrape(wait_s)
            wait_s = min(2 * wait_s, self.every_s)

    def _scrape_when_exported(self) -> None:
        """Scrape, the files of spans when all that has ended by now is in them."""
        began_s = time.time()
        while (files := [Path(url) for url in self.urls if _is_file(url)]) and not self._stop.wait(0.05):
            changed_s = began_s
            with contextlib.suppress(OSError):  # it has just gone: the scrape says so
                changed_s = max(began_s, *(each.stat().st_mtime for each in files))
            if time.time() > min(changed_s + EXPORT_S, began_s + MOST_EXPORT_S):
                break
        self._scrape(0.0)

    def _scrape(self, wait_s: float) -> None:
        if self.power is not None:
            self.power.read()
        for replica in self._replicas:
            if wait_s and _is_file(replica.url):
                continue  # a long file, and only its growth over the level is of use
            found = _fetch(replica.url, self.headers, self.context)
            if isinstance(found, str):
                self._failed[replica.url] = found[:200]
            replica.scrapes.append((wait_s, None if isinstance(found, str) else found))


def why_unreadable(url: str, headers: Mapping[str, str], context: ssl.SSLContext | None = None) -> str | None:
    """Why a metrics page is of no use; None if it has known metrics."""
    found = _fetch(url, headers, context)
    if isinstance(found, str):
        return found
    if found.gauges or found.counters:
        return None
    return "it holds no metric that is known here (the names of vLLM, SGLang, TGI, LMI or lmi-bench)"


def _is_file(url: str) -> bool:
    return "://" not in url and Path(url).is_file()


def _fetch(url: str, headers: Mapping[str, str], context: ssl.SSLContext | None) -> ServerSample | str:
    """A page, or why it cannot be read. Asked by the load's proxy or Unix socket; no redirect is
    followed, which would give the key to whichever host it names."""
    try:
        if _is_file(url):
            return read_spans(Path(url).read_text(encoding="utf-8", errors="replace"))
        reply = Probe(url, headers, timeout_s=TIMEOUT_S, context=context).get_itself()
    except (OSError, ValueError, InputError, http.client.HTTPException) as exc:
        return str(exc) or f"no answer within {TIMEOUT_S:g} s"
    if reply.status != 200:
        return f"HTTP {reply.status}"
    return read_page(reply.body.decode("utf-8", errors="replace"))


def _of_servers(
    replicas: Sequence[_Replica], records: Sequence[RequestRecord], *, expects_hits: bool
) -> dict[str, Any]:
    parts = [replica.grown for replica in replicas]
    names = set(parts[0]).intersection(*parts[1:])  # that every replica has
    grown = {name: sum(part[name] for part in parts) for name in names}
    found: dict[str, Any] = {"sources": [replica.url for replica in replicas]}
    for name in ("running", "waiting", "kv_usage_frac"):
        means, peaks = [], []
        for replica in replicas:
            within = replica.scrapes[1:-1]
            seen = [(page.gauges[name], s) for s, page in within if page and name in page.gauges]
            if seen:
                values, weights = zip(*seen, strict=True)
                means.append(statistics.fmean(values, weights))
                peaks.append(max(values))
        if means:
            share = name == "kv_usage_frac"
            found[name] = {
                "mean": statistics.fmean(means) if share else sum(means),
                "max": max(peaks) if share else sum(peaks),
            }
    for name in ("requests", "preemptions", "prompt_tokens", "generation_tokens"):
        if name in grown:
            found[name] = grown[name]
    warnings = []
    if grown.get("prefix_cache_queries"):
        rate = grown.get("prefix_cache_hits", 0.0) / grown["prefix_cache_queries"]
        found["prefix_cache_hit_rate"] = rate
        if not expects_hits and rate > MAX_PREFIX_HIT_RATE:
            warnings.append(
                f"{rate:.1%} of the prompt tokens came from the server's prefix cache: "
                "TTFT is lower than with prompts it has not seen; leave "
                "--reuse-prompts out"
            )
    found |= _ttft(grown, records)
    if len(replicas) > 1:
        found |= _sharing(replicas, warnings)
    found["warnings"] = warnings
    return found


def _ttft(grown: Mapping[str, float], records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Mean TTFT of the server, its parts, and that of the client; the difference is network and
    HTTP."""
    found = {
        f"{name}_mean_ms": grown[f"{name}_sum_s"] / count * MS_PER_S
        for name in ("ttft", "queue", "prefill")
        if (count := grown.get(f"{name}_count"))
    }
    client_s = [r.token_times_s[0] - r.sent_s for r in records if r.ok and r.token_times_s]
    if "ttft_mean_ms" in found or "queue_mean_ms" in found:
        found["first_tokens"] = grown.get("ttft_count") or grown["queue_count"]
    if "ttft_mean_ms" in found and client_s:
        found["client_ttft_mean_ms"] = client_ms = statistics.fmean(client_s) * MS_PER_S
        found["client_minus_server_ttft_ms"] = client_ms - found["ttft_mean_ms"]
    return found


def _sharing(replicas: Sequence[_Replica], warnings: list[str]) -> dict[str, Any]:
    """Requests of each replica; a replica without requests may not show the counter yet."""
    none_yet = 0.0 if any("requests" in replica.grown for replica in replicas) else None
    requests = {replica.url: replica.grown.get("requests", none_yet) for replica in replicas}
    counts = [count for count in requests.values() if count is not None]
    if len(counts) < len(replicas) or not sum(counts):
        return {"requests_by_replica": requests}
    skew = max(counts) / statistics.fmean(counts)
    if skew > MAX_SKEW:
        shares = ", ".join(f"{count:g}" for count in counts)
        warnings.append(
            f"the replicas got unequal shares of the requests ({shares}): the "
            f"busiest has {skew:.2f} times the mean; look at the load balancer"
        )
    return {"requests_by_replica": requests, "skew": skew}
