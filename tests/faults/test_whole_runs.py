"""A whole level on a server that fails in every way at once: each request ends in its bucket, none
is lost on the way to the disk, and neither a stuck stream nor a sick server holds the run."""

from __future__ import annotations

import json
import time

import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.run_store import RunStore, load_run
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, common_words
from lmi_bench.loadgen.run import sender
from lmi_bench.loadgen.run.sweep import StopRules, run_sweep
from lmi_bench.wire.format import find_format
from tests.faults import misbehaving
from tests.faults.misbehaving import LAST_CHUNK, STREAM_HEAD, chunk, document, event, good_answer, serving

pytestmark = pytest.mark.usefixtures("receiver")

MANIFEST = Manifest(scenario_hash="h")
EVERYTHING_GOES = StopRules(first_timeout=False, max_error_share=None)


def _said(status: str, words: str) -> bytes:
    return document(status, json.dumps({"error": {"message": words}}).encode())


STUCK = (STREAM_HEAD + chunk(event(" a")), 60.0)
FAULTS = {
    "throttled": (_said("429 Too Many Requests", "slow down"),),
    "overloaded": (_said("503 Service Unavailable", "queue is full"),),
    "client_error": (_said("400 Bad Request", "no such model"),),
    "server_error": (_said("500 Internal Server Error", "out of memory"),),
    "broken_stream": (STREAM_HEAD + chunk(event(" a")), None),
    "malformed_frame": (STREAM_HEAD + chunk(b"data: {broken\n\n") + LAST_CHUNK,),
    "short_output": (STREAM_HEAD + chunk(event("", "stop")) + LAST_CHUNK,),
    "cancelled": (_said("499 Client Closed Request", "gone"),),
    "timeout": STUCK,
    "ok": (good_answer(),),
}
KINDS = tuple(FAULTS)


def _run(script, num_requests, *, run=None, users=4, rules=EVERYTHING_GOES, timeout_s=0.5, levels=1):
    """The lines of a sweep, each request answered by script(its place in the order of arrival)."""
    specs = [LevelSpec(i, Load(concurrency=users), num_requests=num_requests) for i in range(levels)]
    prompts = SyntheticPrompts([Lengths(4, 3)], common_words, seed=0)

    async def main():
        async with (
            serving(script) as server,
            HttpTarget(
                f"http://127.0.0.1:{server.port}", find_format("openai"), model="m", native=misbehaving.NATIVE
            ) as target,
        ):
            return await run_sweep(
                specs, target, run, prompts=prompts, summarise=summarise_level, stop_rules=rules, timeout_s=timeout_s
            )

    return run_on_sockets(main())


def test_every_fault_of_a_level_is_counted_in_its_bucket_and_no_record_is_lost(tmp_path):
    """Thirty requests by four users at once, three of each kind: counts, examples, disk agree."""
    with RunStore.create(tmp_path / "run", MANIFEST) as store:
        result = _run(lambda number: FAULTS[KINDS[number % len(KINDS)]], 30, run=store)
    (line,) = result
    assert line.errors_by_kind == {kind: 3 for kind in sorted(KINDS) if kind != "ok"}
    assert (line.requests, line.errors) == (30, 27)
    examples = line.error_examples
    assert "queue is full" in examples["overloaded"][0]
    assert "1 tokens came" in examples["timeout"][0]
    assert set(examples) == set(line.errors_by_kind)

    run = load_run(tmp_path / "run")
    written = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    assert len(written) == 30
    assert sorted(json.loads(text)["request_id"] for text in written) == list(range(30))
    partial = [r for r in run.records[0] if r.status in ("timeout", "broken_stream")]
    assert [len(record.token_times_s) for record in partial] == [1] * 6


def test_the_same_message_is_kept_once_and_of_many_the_first_three():
    def script(number):
        return (_said("500 Internal Server Error", f"fault {number // 2}"),)

    (line,) = _run(script, 12, users=1)
    said = line.error_examples["server_error"]
    assert [text.split("fault ")[1][0] for text in said] == ["0", "1", "2"]
    assert line.errors_by_kind == {"server_error": 12}


def test_a_share_of_errors_beyond_the_limit_ends_the_sweep_early():
    """Every second request fails, and a quarter may: the level stops, and no other begins."""
    result = _run(
        lambda number: FAULTS["server_error" if number % 2 else "ok"],
        400,
        rules=StopRules(max_error_share=0.25),
        levels=3,
    )
    (line,) = result
    assert line.stopped_by == "errors"
    assert line.errors > 100  # of 400, that is when the quarter is certain to be passed
    assert line.requests < 400


def test_a_stuck_stream_does_not_hold_a_run_that_has_no_time_out(monkeypatch):
    """Three users go on while the fourth waits; half a second after the last answer it is over."""
    monkeypatch.setattr(sender, "LEAST_S", 0.5)
    monkeypatch.setattr(sender, "S_PER_TOKEN", 0.1)
    began_s = time.monotonic()
    (line,) = _run(lambda number: STUCK if number == 2 else FAULTS["ok"], 24, timeout_s=None)
    assert time.monotonic() - began_s < 20
    assert line.errors_by_kind == {"timeout": 1}
    assert "stuck after 1 tokens" in line.error_examples["timeout"][0]
    assert line.requests == 24
