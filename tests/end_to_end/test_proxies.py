"""An endpoint behind an HTTP proxy, and one at a Unix socket: found, measured, and said so."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.run_store import load_run
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.endpoint import find_proxy, parse_endpoint
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.wire.format import find_format
from tests.end_to_end.commands import lmi_bench
from tests.end_to_end.small_server import MODEL, small_server
from tests.end_to_end.test_certificates import certificate, over_tls

NAME = "model.example"  # known to the proxy alone
PASSWORD = "pass-of-the-proxy"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
OPENAI = find_format("openai")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def proxy(port):
    """The proxy's address, and the request lines that it printed so far, when it has ended."""
    lines = []
    command = [sys.executable, "-m", "tests.end_to_end.proxy", NAME, str(port)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        yield f"127.0.0.1:{process.stdout.readline().strip()}", lines
    finally:
        process.kill()
        lines += process.communicate()[0].splitlines()


def sweep(url, out, *options, **more):
    load = ("--isl", "8", "--osl", "4", "--concurrency", "2", "--requests-per-level", "6")
    return lmi_bench("sweep", url, *load, *options, "--out", out, **more)


def files_of(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def assert_scraped(run, page):
    (level,) = run.levels
    assert level.server.sources == [page]
    assert level.server.requests == len(run.records[0])
    assert not level.server.unreachable


STATED = ("--model", MODEL, "--protocol", "openai")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ((*STATED, "--receive", "native"), f"{NAME}:7000"),
        ((*STATED, "--receive", "python"), NAME),
        ((), f"{NAME}:7000"),
    ],
    ids=["native", "python", "found"],
)
def test_plain_requests_are_forwarded_on_kept_connections(tmp_path, monkeypatch, options, name):
    """By the whole URL: proxies open tunnels to port 443 alone."""
    with small_server() as port, proxy(port) as (at, lines):
        monkeypatch.setenv("HTTP_PROXY", f"http://me:{PASSWORD}@{at}")
        options = ("--reset-prefix-cache", *options)
        done = sweep(f"http://{name}", tmp_path / "run", *options)
    assert f"through the environment's proxy http://{at}: its delay is in every TTFT" in done.stderr
    assert f"NO_PROXY={NAME}" in done.stderr
    asked = [line for line in lines if line != "connection"]
    assert all(line.split(" ")[1].startswith(f"http://{name}/") for line in asked)
    run = load_run(tmp_path / "run")
    assert all(record.ok for record in run.records[0])
    others = len(asked) - len(run.records[0])  # each on a connection of its own
    assert lines.count("connection") <= 2 + others
    assert f"POST http://{name}/reset_prefix_cache HTTP/1.1" in asked
    assert_scraped(run, f"http://{name}/metrics")
    assert run.manifest.target.to_json()["proxy"] == f"http://{at}"
    assert PASSWORD.encode() not in files_of(tmp_path)
    lmi_bench("report", tmp_path / "run", "-o", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert f"http://{at}" in page
    assert PASSWORD not in page


def test_tls_goes_through_a_tunnel(tmp_path, monkeypatch):
    """The proxy sees the name and no request; the certificate is the server's own."""
    pem = certificate(tmp_path, host=NAME)
    with small_server() as plain, over_tls(f"http://127.0.0.1:{plain}", pem) as url:
        port = int(url.rpartition(":")[2])
        with proxy(port) as (at, lines):
            monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PASSWORD}@{at}")
            sweep(f"https://{NAME}", tmp_path / "run", *STATED, "--cacert", pem)
    asked = {line.rpartition(" ")[0] for line in lines if line != "connection"}
    assert asked == {f"CONNECT {NAME}:443"}
    run = load_run(tmp_path / "run")
    assert all(record.ok for record in run.records[0])
    assert_scraped(run, f"https://{NAME}/metrics")
    assert run.manifest.target.to_json()["proxy"] == f"http://{at}"
    assert PASSWORD.encode() not in files_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("scheme", "user", "name", "said"),
    [
        ("https", "me:wrong", NAME, "407 Proxy Authentication Required"),
        ("https", f"me:{PASSWORD}", "other.example", "403 Forbidden"),
        ("http", "me:wrong", NAME, "itself (HTTP_PROXY gives it user and password): HTTP 407 "),
        ("http", f"me:{PASSWORD}", "other.example", "/other.example: the environment's proxy"),
    ],
)
def test_a_proxy_that_refuses_is_one_line(scheme, user, name, said, tmp_path, monkeypatch):
    with proxy(1) as (at, _):
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://{user}@{at}")
        done = sweep(f"{scheme}://{name}", tmp_path / "run", *STATED, expect=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert said in line
    assert "wrong" not in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scheme", "password", "kind", "said"),
    [
        ("https", "wrong", "connect", f"{{}} does not lead to {NAME}: HTTP 407"),
        ("http", "wrong", "client_error", "proxy {} itself \\(HTTP_PROXY gives it user and password\\): HTTP 407"),
        ("http", PASSWORD, "server_error", "the environment's proxy {} or what is behind it: HTTP 502"),
    ],
    ids=["tunnel", "forwarded", "out of reach"],
)
def test_a_proxy_that_fails_later_is_an_error_of_its_request(scheme, password, kind, said, monkeypatch):
    with proxy(1) as (at, _):
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://me:{password}@{at}")
        request = PlannedRequest(0, 0.0, input_tokens=4, output_tokens=3, prompt_text="time year")

        async def main():
            async with HttpTarget(f"{scheme}://{NAME}", OPENAI, model="m") as target:
                await target.send(request)

        with pytest.raises(TargetError, match=said.format(f"http://{at}")) as got:
            run_on_sockets(main())
    assert got.value.kind == kind
    assert password not in str(got.value)


HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1")
INSIDE = ("inside.example", "a.star.example", "10.1.2.3", "fd00::7")


@pytest.mark.parametrize("host", [*HERE, *INSIDE, NAME, "11.1.2.3"])
def test_this_machine_and_the_hosts_of_no_proxy_are_reached_directly(host, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".inside.example,inside.example, 10.0.0.0/8,[fd00::]/8,*.star.example")
    found = find_proxy("http", host, 80)
    assert (found.name if found else None) == (None if host in HERE + INSIDE else "http://proxy:3128")
    assert find_proxy("https", host, 443) is None


def test_what_is_no_http_proxy_is_refused_without_its_password(monkeypatch):
    for url in (f"socks5://me:{PASSWORD}@proxy:1080", f"http://me:{PASSWORD}/more@proxy:1080"):
        monkeypatch.setenv("ALL_PROXY", url)
        with pytest.raises(InputError, match=f"NO_PROXY={NAME}") as caught:
            parse_endpoint(f"https://{NAME}", OPENAI)
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("receive", ["native", "python"])
def test_a_unix_socket_is_found_and_measured(tmp_path, monkeypatch, receive):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    path = tmp_path / "server.sock"
    with small_server(path):
        url = f"http+unix://{str(path).replace('/', '%2F')}/v1"
        done = sweep(url, tmp_path / "run", "--receive", receive, "--reset-prefix-cache")
    assert "proxy" not in done.stderr
    run = load_run(tmp_path / "run")
    assert all(record.ok for record in run.records[0])
    assert run.levels[0].generator.timestamps == "user"
    assert run.manifest.scenario.target == url
    assert_scraped(run, f"{url.removesuffix('/v1')}/metrics")


def test_a_metrics_page_at_a_unix_socket_is_read_for_a_server_elsewhere(tmp_path):
    path = tmp_path / "server.sock"
    page = f"http+unix://{str(path).replace('/', '%2F')}/metrics"
    with small_server() as port, small_server(path):
        sweep(f"http://127.0.0.1:{port}", tmp_path / "run", *STATED, "--metrics-url", page)
    assert load_run(tmp_path / "run").levels[0].server.sources == [page]


def test_a_socket_that_is_not_there_is_one_line(tmp_path):
    url = f"http+unix://{str(tmp_path / 'none').replace('/', '%2F')}"
    done = sweep(url, tmp_path / "run", *STATED, expect=2)
    assert "No such file" in done.stderr


def test_a_unix_socket_has_no_kernel_times(tmp_path):
    with pytest.raises(InputError, match="a Unix socket gives no kernel receive times"):
        HttpTarget("http+unix://%2Fa", OPENAI, model="m", timestamps="kernel")
