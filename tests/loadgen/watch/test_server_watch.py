"""The server's own view: read from real pages over real HTTP, set beside the client's."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time

import pytest

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.loadgen.watch import server_watch
from lmi_bench.loadgen.watch.machine import GpuPower
from lmi_bench.loadgen.watch.server_metrics import Sample, read_page, read_samples, read_spans
from lmi_bench.loadgen.watch.server_watch import ServerWatch, why_unreadable

# As vLLM 0.10 prints them, shortened.
VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a {{}}, \\"b\\""}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 3.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preemptions}
vllm:num_preemptions_created{{engine="0",model_name="m"}} 1.7e+09
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:request_success_total{{finished_reason="stop",model_name="m"}} {requests}
vllm:request_success_total{{finished_reason="length",model_name="m"}} 5.0
vllm:time_to_first_token_seconds_bucket{{le="0.001",model_name="m"}} 0.0
vllm:time_to_first_token_seconds_count{{model_name="m"}} {requests}
vllm:time_to_first_token_seconds_sum{{model_name="m"}} {ttft_sum_s}
"""
RECORDS = [RequestRecord(i, float(i), Exchange(float(i), (i + 0.3, i + 0.4))) for i in range(4)]


def test_a_sample_has_its_name_its_labels_and_its_value():
    text = '# TYPE a gauge\na{x="1"} 2 1700000000\nab 3\na 4e-1\na{y="}\\"{"} +Inf\na{z="1"} nonsense\na\n'
    read = list(read_samples(text, ["a"]))
    assert read == [Sample("a", '{x="1"}', 2.0), Sample("a", "", 0.4), Sample("a", '{y="}\\"{"}', float("inf"))]


def test_a_page_is_summed_over_its_labels_and_longer_names_are_others():
    page = VLLM_PAGE.format(running=7, preemptions=2, queries=100, hits=1, requests=9, ttft_sum_s=1.5)
    sample = read_page(page)
    assert sample.gauges == {"running": 7.0, "waiting": 3.0, "kv_usage_frac": 0.25}
    assert sample.counters["requests"] == 14.0
    assert sample.counters["preemptions"] == 2.0
    assert sample.counters["ttft_sum_s"] == 1.5


def test_the_means_of_queue_and_prefill_are_those_of_the_level(serve):
    stages = (
        "vllm:request_queue_time_seconds_sum {0}\nvllm:request_queue_time_seconds_count {1}\n"
        "vllm:request_prefill_time_seconds_sum {2}\nvllm:request_prefill_time_seconds_count {1}\n"
    )
    found = _watch(serve(_page(2) + stages.format(9, 2, 9), _page(6, ttft_s=0.25) + stages.format(9.2, 6, 9.6)))
    assert found["first_tokens"] == 4
    assert found["queue_mean_ms"] == pytest.approx(50)
    assert found["prefill_mean_ms"] == pytest.approx(150)


def test_a_page_without_first_tokens_counts_what_left_its_queue(serve):
    page = "tgi_request_queue_duration_sum {0}\ntgi_request_queue_duration_count {1}\n"
    found = _watch(serve(page.format(9, 2), page.format(9.2, 6)))
    assert (found["first_tokens"], found["queue_mean_ms"]) == (4, pytest.approx(50))
    assert "ttft_mean_ms" not in found


def test_names_of_sglang_are_known():
    sample = read_page(
        "sglang:num_running_reqs 4\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5\n"
        "sglang:time_to_first_token_seconds_sum 2\nsglang:queue_time_seconds_count 8\n"
    )
    assert sample.gauges == {"running": 4.0, "waiting": 2.0, "kv_usage_frac": 0.5}
    assert sample.counters == {"ttft_sum_s": 2.0, "queue_count": 8.0}


def test_tgi_and_older_vllm_names_are_known():
    sample = read_page("tgi_batch_current_size 4\ntgi_queue_size 2\ntgi_request_success 8\n")
    assert sample.gauges == {"running": 4.0, "waiting": 2.0}
    assert sample.counters == {"requests": 8.0}
    assert read_page("vllm:gpu_cache_usage_perc 0.5\n").gauges == {"kv_usage_frac": 0.5}


def test_a_share_is_the_mean_over_the_engines_of_a_page():
    lines = [
        f'vllm:{name}{{engine="{i}"}} 0.8\n' for name in ("kv_cache_usage_perc", "num_requests_running") for i in (0, 1)
    ]
    assert read_page("".join(lines)).gauges == {"running": 1.6, "kv_usage_frac": 0.8}


class Pages(http.server.BaseHTTPRequestHandler):
    """Answers each request with the next of its server's pages; the last one stays."""

    def do_GET(self):
        pages = self.server.pages
        self.server.seen.append(dict(self.headers))
        if pages[0].startswith("http://"):
            self.send_response(302)
            self.send_header("Location", pages[0])
            self.end_headers()
            return
        body = (pages.pop(0) if len(pages) > 1 else pages[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(*pages):
        server = http.server.HTTPServer(("127.0.0.1", 0), Pages)
        server.pages, server.seen = list(pages), []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        start.seen = server.seen
        return f"http://127.0.0.1:{server.server_port}/metrics"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _page(requests=0, running=0, hits=0, ttft_s=0.25, preemptions=0):
    return VLLM_PAGE.format(
        running=running,
        preemptions=preemptions,
        queries=requests * 100,
        hits=hits,
        requests=requests,
        ttft_sum_s=requests * ttft_s,
    )


def _watch(*urls, every_s=0.02, level_s=0.3, **options):
    async def main():
        watch = ServerWatch(urls, every_s=every_s, **options)
        await watch.begin()
        await asyncio.sleep(level_s)
        await watch.end()
        return watch.summary(RECORDS).to_json()

    return asyncio.run(main())


def test_a_redirect_is_not_followed_and_the_key_stays_at_its_server(serve):
    """Gateways send unknown paths elsewhere, to a page for signing in for example."""
    elsewhere = serve(_page(1))
    theirs = serve.seen
    url = serve(elsewhere)
    key = {"Authorization": "Bearer secret"}
    _watch(url, headers=key)
    assert "302" in str(why_unreadable(url, key))
    assert serve.seen
    assert theirs == []


def test_a_proxy_of_the_environment_is_not_given_the_key(serve, monkeypatch):
    proxy = serve(_page(1))
    seen = serve.seen
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.removesuffix("/metrics"))
    url = serve(_page(1))
    assert why_unreadable(url, {"Authorization": "Bearer secret"}) is None
    assert seen == []
    assert serve.seen


def test_counters_are_those_of_the_level_and_the_injected_delay_is_the_difference(serve):
    """The server says 250 ms, the client saw 300: 50 ms lie between them."""
    url = serve(_page(10), _page(12, running=4), _page(14, running=2, preemptions=3, hits=2))
    seen = _watch(url)
    assert seen["requests"] == 4.0
    assert seen["preemptions"] == 3.0
    assert seen["running"]["max"] == 4.0
    assert seen["kv_usage_frac"]["mean"] == pytest.approx(0.25)
    assert seen["ttft_mean_ms"] == pytest.approx(250.0)
    assert seen["client_minus_server_ttft_ms"] == pytest.approx(50.0)
    assert seen["prefix_cache_hit_rate"] == pytest.approx(2 / 400)
    assert seen["warnings"] == []


def test_a_level_shorter_than_the_usual_second_is_seen_and_each_look_stands_for_its_time(serve):
    """Looks after 50 and 150 ms, of 1 and 4 running: (1 * 50 + 4 * 100) / 150 = 3."""
    url = serve(_page(10), _page(11, running=1), _page(12, running=4), _page(14))
    seen = _watch(url, every_s=1.0, level_s=0.25)
    assert seen["running"] == {"mean": pytest.approx(3.0), "max": 4.0}


def test_a_warm_prefix_cache_is_warned_of(serve):
    (warning,) = _watch(serve(_page(10), _page(14, hits=40)))["warnings"]
    assert warning.startswith("10.0% of the prompt tokens came from the server's prefix cache")


def test_replicas_are_added_up_and_an_uneven_share_is_named(serve):
    busy, idle = serve(_page(0), _page(30, running=2)), serve(_page(0), _page(10, running=1))
    seen = _watch(busy, idle)
    assert seen["requests"] == 40.0
    assert seen["running"]["max"] == 3.0
    assert seen["skew"] == pytest.approx(1.5)
    assert "unequal shares of the requests (30, 10)" in seen["warnings"][0]


def test_a_replica_that_was_asked_nothing_counts_although_its_counters_are_not_there_yet(serve):
    """All thirty went to one of two: twice the mean."""
    fresh = "vllm:num_requests_running 0\n"
    seen = _watch(serve(fresh, fresh + "vllm:request_success_total 30\n"), serve(fresh))
    assert list(seen["requests_by_replica"].values()) == [30.0, 0.0]
    assert seen["skew"] == pytest.approx(2.0)
    assert "(30, 0)" in seen["warnings"][0]


def test_a_page_that_is_not_there_is_named_and_breaks_nothing():
    seen = _watch("http://127.0.0.1:1/metrics")
    assert list(seen) == ["unreachable"]
    assert "refused" in seen["unreachable"]["http://127.0.0.1:1/metrics"]


class Nvml:
    """A GPU of 300 W at 80 %, with an energy counter or without."""

    class NVMLError(Exception):
        pass

    def __init__(self, clock, *, counter):
        self.clock, self.counter = clock, counter

    def nvmlDeviceGetPowerUsage(self, handle):
        return 300_000

    def nvmlDeviceGetUtilizationRates(self, handle):
        return type("Rates", (), {"gpu": 80})()

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.counter:
            raise self.NVMLError("not supported")
        return int(self.clock() * 300_000)


@pytest.mark.parametrize("counter", [True, False])
def test_constant_power_gives_watts_times_seconds(counter):
    """300 W for 10 s are 3,000 J; over 6,000 tokens half a joule each."""
    now = [0.0]
    meter = GpuPower(Nvml(lambda: now[0], counter=counter), ["gpu"], clock=lambda: now[0])
    for second in range(11):
        now[0] = float(second)
        meter.read()
    seen = meter.summary(6000)
    assert seen.energy_j == pytest.approx(3000.0)
    assert seen.joules_per_output_token == pytest.approx(0.5)
    assert seen.gpu_use_frac == pytest.approx(0.8)
    assert seen.valid


def test_energy_of_a_short_level_is_not_valid():
    now = [0.0]
    meter = GpuPower(Nvml(lambda: now[0], counter=True), ["gpu"], clock=lambda: now[0])
    for second in (0.0, 1.0):
        now[0] = second
        meter.read()
    assert not meter.summary(10).valid


def test_a_key_is_not_in_what_is_printed_of_a_watch():
    watch = ServerWatch(["http://127.0.0.1:9/metrics"], headers={"Authorization": "Bearer hidden"})
    assert "hidden" not in repr(watch)


SPAN = (
    '{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"llm_request","attributes":['
    '{"key":"gen_ai.latency.time_in_queue","value":{"doubleValue":0.125}},'
    '{"key":"gen_ai.latency.time_to_first_token","value":{"doubleValue":%s}},'
    '{"key":"gen_ai.usage.prompt_tokens","value":{"intValue":"3"}},'
    '{"key":"gen_ai.latency.time_in_model_prefill","value":{"doubleValue":6.25e-02}}]}]}]}]}\n'
)


def test_spans_that_a_collector_writes_later_are_those_of_the_level(tmp_path, monkeypatch):
    """One of the warm-up comes when the watch begins, the level's own when it has ended."""
    monkeypatch.setattr(server_watch, "EXPORT_S", 0.4)
    file = tmp_path / "spans.jsonl"
    file.write_text(SPAN % 9)
    assert why_unreadable(str(file), {}) is None

    def export(text):
        time.sleep(0.2)
        with file.open("a") as out:
            out.write(text)

    async def main():
        watch = ServerWatch([str(file)], every_s=0.01)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.begin())
            group.create_task(asyncio.to_thread(export, SPAN % 9))
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.end())
            group.create_task(asyncio.to_thread(export, SPAN % 0.25 * 4))
        return watch.summary(RECORDS)

    found = asyncio.run(main())
    assert (found.sources, found.first_tokens) == ([str(file)], 4)
    assert (found.queue_mean_ms, found.prefill_mean_ms, found.ttft_mean_ms) == (125, 62.5, 250)
    assert found.client_minus_server_ttft_ms == pytest.approx(50)
    assert found.running is None


def test_a_level_that_is_cancelled_does_not_wait_for_its_spans(tmp_path):
    file = tmp_path / "spans.jsonl"
    file.touch()

    async def main():
        watch = ServerWatch([str(file)])
        task = asyncio.create_task(watch.begin())
        await asyncio.sleep(0.1)
        task.cancel()
        watch.abandon()

    began_s = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began_s < server_watch.EXPORT_S - 1


def test_a_span_without_a_finite_time_is_left_out():
    assert read_spans(SPAN % "1e999").counters["ttft_count"] == 0
    assert read_spans(SPAN % 0.5 + SPAN % "1e999").counters["ttft_sum_s"] == 0.5


def test_a_file_of_spans_that_goes_away_ends_no_level(tmp_path, monkeypatch):
    monkeypatch.setattr(server_watch, "EXPORT_S", 0.2)
    file = tmp_path / "spans.jsonl"
    file.write_text(SPAN % 9)

    async def main():
        watch = ServerWatch([str(file)])
        await watch.begin()
        file.unlink()
        await watch.end()
        return watch.summary(RECORDS)

    found = asyncio.run(main())
    assert list(found.unreachable) == [str(file)]
    assert found.ttft_mean_ms is None
