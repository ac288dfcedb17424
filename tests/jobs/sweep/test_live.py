"""`sweep --live`: a page that follows a sweep, for this machine alone, and the file it leaves."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lmi_bench
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT
from lmi_bench.jobs.sweep.live import LiveReport
from lmi_bench.report.live import LivePage, serve
from tests.end_to_end.commands import ONCE, command, environment
from tests.loadgen.aws.runtime_server import runtime_server


@pytest.fixture(scope="module")
def page():
    """A page that no process builds, and its port."""
    made = LivePage()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = serve(listening, made)
        yield made, listening.getsockname()[1]
        server.shutdown()


def answer(port, path="/", *, method="GET", hosts=("localhost",)):
    """Status, headers and body of a request with these Host lines."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    found = connection.getresponse()
    body = found.read()
    connection.close()
    return found.status, found.headers, body.decode()


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost", "LocalHost:8080", "[::1]:80"])
def test_a_name_of_this_machine_is_answered(page, host):
    """Of any port: `ssh -L 9000:127.0.0.1:8000` forwards one to another."""
    assert answer(page[1], hosts=[host])[0] == 200


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example"],
        ["evil.example:8080"],
        ["127.0.0.1.evil.example"],
        ["localhost.evil"],
        ["127.0.0.1@evil.example"],
        ["evil.example@127.0.0.1"],
        [""],
        [],
        ["localhost", "evil.example"],
        ["192.168.0.2"],
        ["0.0.0.0"],
    ],
)
def test_any_other_name_is_refused_whatever_it_asks_for(page, hosts):
    """DNS rebinding: a page of another site whose name points to 127.0.0.1 in the meantime."""
    for path in ("/", "/state"):
        status, _, body = answer(page[1], path, hosts=hosts)
        assert status in (400, 403)
        assert "revision" not in body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/state", 200),
        ("GET", "/levels.jsonl", 404),
        ("GET", "/../manifest.json", 404),
        ("GET", "/state/", 404),
        ("GET", "http://localhost/", 404),
        ("POST", "/", 405),
        ("HEAD", "/", 405),
        ("OPTIONS", "/state", 405),
        ("DELETE", "/", 405),
    ],
)
def test_two_paths_are_known_and_read_only_and_no_other_site_may_read_them(page, method, path, status):
    found, headers, _ = answer(page[1], path, method=method)
    assert found == status
    assert headers["Access-Control-Allow-Origin"] is None
    assert status != 200 or headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_a_level_runs_since_its_first_progress_and_ends_with_the_sweep(monkeypatch):
    page, clock = LivePage(), iter(["10:00:00", "10:00:09", "10:00:30"])
    monkeypatch.setattr(time, "strftime", lambda _: next(clock))
    lines = [{"text": "level 1", "done": done, "total": 3} for done in (0, 2, 3, 0)]
    since = []

    def sent():
        for line in lines:
            yield json.dumps(line)
            since.append(page.progress["since"])

    page.hear(sent())
    assert since == ["10:00:00", "10:00:00", "10:00:00", "10:00:09"]
    assert page.over.is_set()


def test_a_port_that_is_taken_is_one_line_before_anything_is_sent(tmp_path):
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken, runtime_server(signed=False) as url:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"--live {port}: cannot listen .*in use"):
            lmi_bench.sweep(target=url, concurrency=[1], live=port, out=out)
    assert not out.exists()
    with pytest.raises(InputError, match="--live 70000: a port is"):
        LiveReport(70000, SILENT)


def test_a_simulated_sweep_leaves_the_file_alone(tmp_path):
    said = []

    class Listener(type(SILENT)):
        def note(self, text):
            said.append(text)

    out = tmp_path / "run"
    load = {"concurrency": [1], "requests_per_level": 1, "output_tokens": 2}
    target = {"target": "sim:ml.g5.2xlarge", "model": "llama-2-7b"}
    lmi_bench.sweep(**target, **load, live=0, out=out, listener=Listener())
    assert "live report: http" not in " ".join(said)
    assert said[-1] == f"report: {out / 'report.html'}"
    assert (out / "report.html").exists()


def test_the_page_shows_each_level_that_has_ended_and_ctrl_c_leaves_the_file(tmp_path):
    out = tmp_path / "run"
    with runtime_server(step_s=0.02, signed=False) as url:
        load = ("--isl", "8", "--osl", "16", "--concurrency", "32,1", "--requests-per-level")
        sweep = subprocess.Popen(
            command("sweep", ONCE, "--target", url, *load, "256", "--live", "--out", out),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        port = int(re.fullmatch(r"live report: http://127\.0\.0\.1:(\d+)/\n", sweep.stderr.readline())[1])
        limit_s = time.monotonic() + 600
        while 'title="concurrency 32"' not in (body := answer(port)[2]):
            assert sweep.poll() is None
            assert time.monotonic() < limit_s
            time.sleep(0.2)
        state = json.loads(answer(port, "/state")[2])
        assert answer(port, hosts=["evil.example"])[0] == 403
        sweep.send_signal(signal.SIGINT)
        sweep.communicate(timeout=120)
    assert sweep.returncode in (130, -signal.SIGINT)
    assert 'title="concurrency 1"' not in body
    assert "connect-src" in body
    assert "concurrency 1 " in state["text"]
    assert not state["ended"]
    assert list(tmp_path.glob("run/*.html")) == [out / "report.html"]
    again = tmp_path / "again.html"
    lmi_bench.write_report(runs=[out], out=again)
    dated = re.compile(r"on [\d-]+ [\d:]+ UTC")
    left, made = (dated.sub("", each.read_text()) for each in (out / "report.html", again))
    assert left == made
    assert "connect-src" not in left
    with pytest.raises(ConnectionRefusedError):
        answer(port)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_beside_the_sweep_yields_to_it_and_ends_when_the_sweep_is_killed(tmp_path):
    page = LiveReport(0, SILENT)
    tasks = Path(f"/proc/{page.process.pid}/task")
    limit_s = time.monotonic() + 600
    while True:
        stats = [(task / "stat").read_text().rpartition(")")[2] for task in tasks.iterdir()]
        if any(int(stat.split()[16]) >= 5 for stat in stats):
            break
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    page.process.stdin.close()  # as the end of a killed sweep does
    assert page.process.wait(120) == 0
