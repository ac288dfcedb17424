"""Two models on one host: each server keeps its own limits, and neither feels the other's."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

from tests.end_to_end.commands import Server, lmi_bench

PLACE = ("--executor", "simulated", "--instance", "ml.g5.12xlarge")


def ask(server, output_tokens):
    body = {"inputs": "word " * 16, "parameters": {"max_new_tokens": output_tokens}}
    request = urllib.request.Request(
        server.url + "/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as exc:
        return exc.code


def test_an_overloaded_model_refuses_while_the_other_one_answers():
    full = Server(*PLACE, "--model", "llama-2-7b", "--max-concurrent-requests", "1")
    free = Server(*PLACE, "--model", "mistral-7b", "--max-concurrent-requests", "4")
    try:
        long_one = threading.Thread(target=ask, args=(full, 400))
        long_one.start()
        refused = 0
        while long_one.is_alive() and not refused:  # until the long one has arrived there
            refused = ask(full, 4) if ask(free, 4) == 200 else -1
            refused = 0 if refused == 200 else refused
        assert refused == 503
        assert ask(free, 4) == 200
        long_one.join(timeout=60)
        assert ask(full, 4) == 200
    finally:
        for server in (full, free):
            server.stop()


def test_memory_that_is_left_holds_a_larger_batch_which_gives_more(tmp_path):
    """`deploy limits` names the batch that fits; with it the same instance gives more."""
    told = lmi_bench("deploy", "limits", "--model", "llama-2-7b", "--instance", "ml.g5.12xlarge")
    assert "max_rolling_batch_size from this table" in told.stdout
    speeds = []
    for batch in ("4", "16"):
        out = tmp_path / batch
        lmi_bench(
            *("sweep", "--target", "sim:ml.g5.12xlarge", "--model", "llama-2-7b", "--tp", "4"),
            *("--concurrency", "16", "--input-tokens", "64", "--output-tokens", "64"),
            *("--max-batch", batch, "--out", out),
        )
        levels = [json.loads(line) for line in (out / "levels.jsonl").read_text().splitlines()]
        speeds.append(levels[0]["throughput_tokens_per_s"])
    assert speeds[1] > 1.5 * speeds[0]
