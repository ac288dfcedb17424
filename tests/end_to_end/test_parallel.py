"""`--tp`, `--replicas` and `profile collectives` as a person types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.commands import LIMIT_S, command, environment, lmi_bench


def words(text):
    return text.split()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_groups_of_two_ranks_share_a_sweep(tmp_path):
    done = lmi_bench(
        *words("sweep --model demo-15m --tp 2 --replicas 2 --dtype float32 --num-blocks 64"),
        *words("--concurrency 2 --isl 8 --osl 4 --requests-per-level 4 --out"),
        tmp_path / "run",
    )
    assert "2 replicas behind a round-robin router; 2 ranks each, sums over shared memory" in done.stderr
    assert json.loads((tmp_path / "run/manifest.json").read_text())["target"]["tensor_parallel"] == 2
    (level,) = lines(tmp_path / "run/levels.jsonl")
    assert level["errors"] == 0
    assert level["requests_by_replica"] == {"0": 3, "1": 3}


def test_replicas_share_the_requests_and_levels_count_them(tmp_path):
    lmi_bench(
        *words("sweep --target sim:ml.g5.12xlarge --model llama-2-7b --replicas 4"),
        *words("--concurrency 8 --osl 16 --requests-per-level 24 --warmup-requests 0 --out"),
        tmp_path / "run",
    )
    (level,) = lines(tmp_path / "run/levels.jsonl")
    assert level["requests_by_replica"] == {"0": 8, "1": 8, "2": 8, "3": 8}
    target = json.loads((tmp_path / "run/manifest.json").read_text())["target"]
    assert (target["replicas"], target["router"]) == (4, "round_robin")
    records = lines(tmp_path / "run/requests.jsonl")
    assert [record["replica"] for record in records] == [n % 4 for n in range(32)]


def test_max_takes_every_device_that_the_replicas_leave(tmp_path):
    lmi_bench(
        *words("sweep --target sim:ml.g5.12xlarge --model llama-2-7b --tp max"),
        *words("--replicas 2 --concurrency 2 --osl 4 --out"),
        tmp_path / "run",
    )
    target = json.loads((tmp_path / "run/manifest.json").read_text())["target"]
    assert target["tensor_parallel"] == 2  # of 4 devices


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--model demo-15m --tp 5", "6 query heads of .* cannot be split over 5 devices"),
        ("--model demo-15m --tp none", "--tp none: write a number of at least 1, or max"),
        (
            "--target sim:ml.g5.12xlarge --model llama-2-7b --tp 2 --replicas 3",
            "3 replicas of 2 .* need 6, but ml.g5.12xlarge has 4",
        ),
        ("--target sim:ml.g5.48xlarge --model falcon-7b --tp 8", "71 query heads"),
        ("--target sim:ml.g5.12xlarge --model llama-2-7b --replicas 2 --router best", "router"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_numbers(tmp_path, arguments, reason):
    done = lmi_bench("sweep", *arguments.split(), "--out", tmp_path / "run", expect=2)
    assert re.search(reason, " ".join(done.stderr.split()))


def test_profile_collectives_prints_and_writes_times_and_fit(tmp_path):
    out = tmp_path / "collectives.json"
    done = lmi_bench("profile", "collectives", "--rounds", "1", "--out", out)
    assert "latency us" in done.stdout
    written = json.loads(out.read_text())["all_reduce"]
    assert "gloo" in written
    for measured in written.values():
        assert len(measured["points"]) == 8
        assert all(point["time_s"] > 0 for point in measured["points"])
        assert measured["latency_s"] >= 0


def _children(process_id):
    """Processes below one, by name of their main thread's command line."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == process_id:
            child = int(stat.parent.name)
            found += [child, *_children(child)]
    return found


def _generate(url):
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return answer.status, answer.read()


def _running(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as answer:
        return re.search(r"^vllm:num_requests_running.* 1$", answer.read().decode(), re.MULTILINE)


def _answer_or_refusal(url):
    try:
        return _generate(url)
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("busy", [True, False], ids=["while a request runs", "while idle"])
def test_a_server_whose_rank_dies_answers_with_the_reason_and_ends(busy):
    server = subprocess.Popen(
        command(*words("serve --model demo-15m --tp 2 --dtype float32 --num-blocks 64 --port 0")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        url = re.search(r"http://\S+", server.stdout.readline())[0]
        ranks = _children(server.pid)
        asked = ThreadPoolExecutor(1).submit(_answer_or_refusal, url) if busy else None
        while busy and not _running(url):
            time.sleep(0.02)
        for child in ranks:
            if "forkserver" in Path(f"/proc/{child}/cmdline").read_text() and not _children(child):
                os.kill(child, signal.SIGKILL)  # a rank: forked, and nothing below it
                break
        if asked is not None:
            status, said = asked.result(LIMIT_S)
            assert status == 500
            assert re.search(r"rank \d of 2 .*killed by signal 9", said.decode())
        _, stderr = server.communicate(timeout=LIMIT_S)
        assert server.returncode == 1
        assert re.search(r"^error: rank \d of 2 .*killed by signal 9", stderr, re.MULTILINE)
        assert "Traceback" not in stderr
    finally:
        server.kill()
        server.wait()
    end_s = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{child}").exists() for child in ranks):
        assert time.monotonic() < end_s, "processes are left behind"
        time.sleep(0.1)
