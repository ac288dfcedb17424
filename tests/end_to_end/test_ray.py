"""`sweep --ray`: one worker on each node of a Ray cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT
from lmi_bench.loadgen.run.hosts import let_in
from tests.end_to_end.commands import command, environment, lmi_bench
from tests.loadgen.aws.runtime_server import runtime_server

ROOT = Path(__file__).parents[2]
SMALL = ("--isl", "8", "--osl", "6", "--concurrency", "4", "--warmup-requests", "0")
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})  # as on Kubernetes
for _ in range(2):
    cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def _run(*args, **variables):
    return subprocess.run(command(*args), env=environment() | variables, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster on this machine: two nodes of one core each, and a head without."""
    pytest.importorskip("ray", reason="Ray is not installed: the extra `distributed`")
    started = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    address = started.stdout.readline().strip()
    yield address
    started.communicate()


def _free_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_each_node_sends_its_share_of_one_level(cluster, tmp_path):
    with runtime_server() as url:
        args = ("sweep", url, *SMALL, "--requests-per-user", "3", "--out", tmp_path / "run")
        done = _run(*args, "--ray", cluster, "--listen", _free_address())
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, (tmp_path / "run/levels.jsonl").read_text().splitlines())
    assert line["generator"]["workers"] == 2
    assert (line["requests"], line["errors"]) == (16, 0)
    records = (tmp_path / "run/requests.jsonl").read_text().splitlines()
    assert sorted(json.loads(each)["request_id"] for each in records) == list(range(16))


def test_an_address_without_a_cluster_is_one_line(cluster, tmp_path):
    with runtime_server() as url:
        args = ("sweep", url, *SMALL, "--out", tmp_path / "run", "--ray")
        done = _run(*args, _free_address())
        assert done.returncode == 2
        assert "error: --ray 127.0.0.1:" in done.stderr
        assert "Connection refused" in done.stderr
        assert "--ray here: write HOST:PORT" in _run(*args, "here").stderr


def test_a_secret_that_is_too_short_is_one_line(cluster, tmp_path):
    with runtime_server() as url:
        args = ("sweep", url, *SMALL, "--out", tmp_path / "run", "--ray", cluster)
        done = _run(*args, "--listen", _free_address(), LMI_BENCH_SECRET="short")
    assert done.returncode == 2
    assert "set the variable LMI_BENCH_SECRET" in done.stderr
    assert "Traceback" not in done.stderr


def test_work_items_run_on_the_nodes_and_are_kept(cluster, tmp_path):
    program = (
        "import argparse, json, pathlib, sys\n"
        "import ray\n"
        "from benchmarks.support.work_items import mapped\n"
        "def work(number):\n"
        "    return [number * number, ray.get_runtime_context().get_node_id()]\n"
        "given = argparse.Namespace(ray=sys.argv[1], keep=pathlib.Path(sys.argv[2]))\n"
        "given.workers = 1\n"
        "print(json.dumps(mapped(work, [[n] for n in range(12)], given)))\n"
    )
    folder = tmp_path / "kept"
    command = [sys.executable, "-c", program, cluster, str(folder)]
    variables = environment()
    paths = (str(ROOT), variables.get("PYTHONPATH"))
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    found = []
    for _ in range(2):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [square for square, _ in found[0]] == [n * n for n in range(12)]
    assert len(list(folder.iterdir())) == 12
    assert found[1] == found[0]  # with the nodes of the first time: nothing ran again


def test_a_worker_that_ends_before_it_dials_in_ends_the_wait(monkeypatch):
    def check():
        raise InputError("a worker ended")

    monkeypatch.setenv("LMI_BENCH_SECRET", "0123456789abcdef")
    with pytest.raises(InputError, match="a worker ended"):
        list(let_in(("127.0.0.1", 0), [0], SILENT, check))


def test_a_second_launcher_and_a_simulated_target_are_one_line():
    url = "http://127.0.0.1:9"
    both = lmi_bench("sweep", url, "--ray", "auto", "--hosts", "local", expect=2)
    assert "--ray and --hosts both say where workers run" in both.stderr
    simulated = ("sweep", "sim:ml.g5.2xlarge", "-m", "llama-2-7b", "--ray", "auto")
    assert "--ray is for an endpoint" in lmi_bench(*simulated, expect=2).stderr
