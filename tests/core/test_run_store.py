"""The run folder: what is finished stays, what is torn is dropped, what is secret never arrives."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.core import run_store
from lmi_bench.core.durable import LOCK
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.findings import Knee
from lmi_bench.core.level import Level
from lmi_bench.core.manifest import Manifest, RunScenario, TargetFacts
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import RunStore, load_run, repair_run
from lmi_bench.core.scenario import Scenario
from tests.levels import level_of

RECORD = RequestRecord(
    request_id=0, due_s=0.0, exchange=Exchange(0.001, (0.25, 0.5), finish_reason="length", ended_s=0.5), input_tokens=8
)


def _manifest(**changes: object) -> Manifest:
    return Manifest(
        scenario=RunScenario.from_json(Scenario().canonical()),
        scenario_hash=Scenario().hash(),
        target=TargetFacts(kind="engine"),
        commands=[["lmi-bench"]],
        **changes,
    )


def _level(level: int, attempt: int = 1, **extra: object) -> Level:
    return level_of(level=level, attempt=attempt, stopped_by=None, **extra)


def test_a_record_comes_back_as_it_was_written(tmp_path):
    failed = RequestRecord(1, 0.0, Exchange(0.0), status="throttled", error="429", input_tokens=8)
    with RunStore.create(tmp_path / "run", _manifest()) as store:
        store.append_level([RECORD, failed], _level(0))
    run = load_run(tmp_path / "run")
    assert run.records == [(RECORD, failed)]
    assert run.levels == [_level(0)]
    assert run.knees is None


def test_every_field_of_a_line_survives_reading_and_writing_again(tmp_path):
    """requests.jsonl byte for byte, the line written by hand in the documented order."""
    line = (
        b'{"level":0,"attempt":1,"request_id":3,"due_s":0.125,"sent_s":0.25,'
        b'"token_times_s":[0.5,0.75],"token_counts":[1,3],"input_tokens":8,"output_tokens":5,'
        b'"status":"broken_stream","error":"closed","finish_reason":"length","ended_s":1.0,'
        b'"first_answer_s":0.75,"reasoning_tokens":1,"streamed":false,"replica":0,"queue_s":0.0,'
        b'"prefill_s":0.25,"decode_s":0.5,"connect_s":0.0625,"retries":2,"tls_s":0.03125,'
        b'"held_s":0.015625,"asked_tokens":6,"cached_tokens":0,"session":2,"turn":1,"of_turns":3}\n'
    )
    with RunStore.create(tmp_path / "a", _manifest()) as store:
        store.append_level([], _level(0))
    (tmp_path / "a" / "requests.jsonl").write_bytes(line)
    with RunStore.create(tmp_path / "b", _manifest()) as store:
        store.append_level(load_run(tmp_path / "a").records[0], _level(0))
    assert (tmp_path / "b" / "requests.jsonl").read_bytes() == line


def test_a_folder_that_exists_is_refused(tmp_path):
    with pytest.raises(InputError, match="--resume"):
        RunStore.create(tmp_path, _manifest())


def test_a_run_that_was_killed_before_its_manifest_may_begin_again(tmp_path):
    RunStore.create(tmp_path / "run", _manifest()).close()
    (tmp_path / "run" / "manifest.json").unlink()
    RunStore.create(tmp_path / "run", _manifest()).close()
    assert load_run(tmp_path / "run").levels == []


def test_two_sweeps_never_write_one_folder(tmp_path):
    with RunStore.create(tmp_path / "run", _manifest()), pytest.raises(InputError, match=f"process {os.getpid()}"):
        RunStore.resume(tmp_path / "run", _manifest())
    RunStore.resume(tmp_path / "run", _manifest()).close()


def test_another_scenario_is_refused_with_both_hashes_and_the_first_difference(tmp_path):
    RunStore.create(tmp_path / "run", _manifest()).close()
    other = Scenario().with_overrides({"workload.input_tokens": 64})
    asked = Manifest(scenario=RunScenario.from_json(other.canonical()), scenario_hash=other.hash())
    with pytest.raises(InputError) as caught:
        RunStore.resume(tmp_path / "run", asked)
    text = str(caught.value)
    assert Scenario().hash()[:12] in text
    assert other.hash()[:12] in text
    assert "workload.input_tokens: 256, now 64" in text


def test_a_line_without_an_end_fills_no_memory(tmp_path, monkeypatch):
    """Zeros that a power loss left, more of them than any line has bytes."""
    monkeypatch.setattr(run_store, "_MOST_LINE_BYTES", 5000)
    path = tmp_path / "run"
    with RunStore.create(path, _manifest()) as store:
        store.append_level([RECORD], _level(0))
    with (path / "levels.jsonl").open("ab") as file:
        file.write(bytes(10**5) + b"\n")
    with pytest.warns(UserWarning, match="line 2 is cut off"):
        assert load_run(path).records == [(RECORD,)]
    repair_run(path)
    assert load_run(path).records == [(RECORD,)]


def test_resuming_where_there_is_no_run_says_so(tmp_path):
    with pytest.raises(InputError, match="no run to resume"):
        RunStore.resume(tmp_path / "absent", _manifest())


@pytest.mark.parametrize("name", ["manifest.json", "requests.jsonl", "levels.jsonl", "knees.json"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_of_links_is_neither_read_nor_written(tmp_path, name, is_there):
    path, outside = tmp_path / "run", tmp_path / "outside"
    with RunStore.create(path, _manifest()) as store:
        store.append_level([RECORD], _level(0))
        store.write_knees([])
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    content = outside.read_bytes()
    if not is_there:
        if name == "manifest.json":
            return  # then it is no run
        outside.unlink()
    for use in (load_run, repair_run, lambda run: RunStore.resume(run, _manifest())):
        with pytest.raises(InputError, match=rf"{name} is a symbolic link"):
            use(path)
    assert outside.read_bytes() == content if is_there else not outside.exists()


def test_torn_last_lines_are_dropped_and_finished_levels_kept_byte_for_byte(tmp_path):
    path = tmp_path / "run"
    with RunStore.create(path, _manifest()) as store:
        store.append_level([RECORD], _level(0))
    finished = {name: (path / name).read_bytes() for name in ("requests.jsonl", "levels.jsonl")}
    with (path / "requests.jsonl").open("ab") as file:  # killed while it wrote level 1
        file.write(finished["requests.jsonl"].replace(b'"level":0', b'"level":1'))
        file.write(b'{"level":1,"attempt":1,"request_id":1,"du')
    with (path / "levels.jsonl").open("ab") as file:
        file.write(b'{"level":1,"att')
    with pytest.warns(UserWarning, match="line [23] is cut off") as told:
        assert load_run(path).records == [(RECORD,)]
    assert len(told) == 2, "one for each file"
    with RunStore.resume(path, _manifest()) as store:
        assert [line.index for line in store.levels] == [0]
        assert store.next_attempt(1) == 2  # attempt 1 left requests that must never count
        store.append_level([RECORD], _level(1, attempt=2))
    for name, content in finished.items():
        assert (path / name).read_bytes().startswith(content)
    run = load_run(path)
    assert [(line.index, line.attempt) for line in run.levels] == [(0, 1), (1, 2)]
    assert [len(records) for records in run.records] == [1, 1]


def test_a_kill_in_mid_write_loses_the_level_in_flight_and_nothing_else(tmp_path):
    """A real process appends level after level until SIGKILL; whatever it left must resume."""
    path = tmp_path / "run"
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        from lmi_bench.core.level import Level
        from lmi_bench.core.load import Load
        from lmi_bench.core.manifest import Manifest
        from lmi_bench.core.run_store import RunStore
        from lmi_bench.core.exchange import Exchange
        from lmi_bench.core.records import RequestRecord
        store = RunStore.create(Path({str(path)!r}), Manifest(scenario_hash="h"))
        level = 0
        while True:
            records = [RequestRecord(i, 0.0, Exchange(0.0, (0.1,) * 50)) for i in range(200)]
            store.append_level(records, Level(level, 1, Load(1)))
            print(level, flush=True)
            level += 1
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    with process.stdout:
        told = [int(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout]
    process.wait()
    before = (path / "levels.jsonl").read_bytes()
    with RunStore.resume(path, Manifest(scenario_hash="h")) as store:  # the lock of a killed process is gone
        finished = len(store.levels)
        assert finished >= len(told)
        store.append_level([RECORD], _level(finished, store.next_attempt(finished)))
    run = load_run(path)
    assert [line.index for line in run.levels] == list(range(finished + 1))
    assert [len(records) for records in run.records] == [200] * finished + [1]
    assert (path / "levels.jsonl").read_bytes().startswith(before[: before.rfind(b"\n") + 1])


@contextmanager
def no_room():
    """No file of this process may grow: every write fails, as on a full disk or beyond a quota."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_says_what_to_do_and_keeps_the_levels_before(tmp_path):
    """The files count levels from 0, the message from 1: the second could not be written."""
    path = tmp_path / "run"
    with RunStore.create(path, _manifest()) as store:
        store.append_level([RECORD], _level(0))
        with no_room(), pytest.raises(LmiBenchError, match=r"cannot write level 2 .*--resume"):
            store.append_level([RECORD], _level(1))
        assert [line.index for line in store.levels] == [0]
    assert len(load_run(path).levels) == 1


def test_a_disk_that_is_full_from_the_beginning_or_at_the_end_is_one_line(tmp_path):
    """A new file is written beside the old one first, and none is left behind."""
    path = tmp_path / "run"
    path.mkdir()
    (path / LOCK).touch()
    with no_room(), pytest.raises(LmiBenchError, match=r"cannot write the run to .*start again"):
        RunStore.create(path, _manifest())
    assert not [*path.glob("*.new")], "half a file would take what room is left"
    assert sum(each.stat().st_size for each in path.iterdir()) == 0
    with RunStore.create(path, _manifest()) as store:
        store.append_level([RECORD], _level(0))
        no_knees = r"cannot write knees\.json .*the levels are safe"
        with no_room(), pytest.raises(LmiBenchError, match=no_knees):
            store.write_knees([])
    with no_room(), pytest.raises(LmiBenchError, match="make room and try again"):
        RunStore.resume(path, _manifest())
    RunStore.resume(path, _manifest()).close()


@pytest.mark.parametrize("left", [(LOCK,), (LOCK, "manifest.json.0a1b2c3d.new"), (LOCK, "levels.jsonl")])
def test_a_run_killed_before_its_manifest_begins_anew(tmp_path, left):
    for name in left:
        (tmp_path / name).touch()
    RunStore.create(tmp_path, _manifest()).close()
    assert load_run(tmp_path).levels == []


@pytest.mark.parametrize("left", [("notes.txt",), (LOCK, "notes.txt"), ("manifest.json.new",)])
def test_a_folder_with_anything_else_is_refused(tmp_path, left):
    for name in left:
        (tmp_path / name).touch()
    with pytest.raises(InputError, match="exists: name another folder"):
        RunStore.create(tmp_path, _manifest())


def test_secrets_are_never_written(tmp_path):
    secret, custom = "sk-abcdefghijklmnop1234", "s3cr3t-value-of-mine"
    target = {
        "url": f"https://user:{custom}@host:8000/v1?api_key={secret}&x=1",
        "api_key": secret,
        "headers": {"Authorization": f"Bearer {custom}", "Accept": "*/*"},
    }
    commands = [
        ["lmi-bench", "sweep", "--api-key", custom, f"--token={custom}", "--input-tokens", "8"],
        ["lmi-bench", "sweep", "-H", f"X-Api-Key: {custom}"],
    ]
    manifest = replace(_manifest(), target=TargetFacts.from_json(target), commands=commands)
    failed = RequestRecord(
        0, 0.0, Exchange(0.0), status="client_error", error=f"401: Authorization: Bearer {custom} is wrong"
    )
    with RunStore.create(tmp_path / "run", manifest, secrets=[custom]) as store:
        store.append_level([failed], _level(0, first_error=f"key {custom} unknown"))
        store.write_knees([Knee("theory", cause=custom)])
    for file in (tmp_path / "run").iterdir():
        assert custom not in file.read_text(encoding="utf-8"), file.name
        assert secret not in file.read_text(encoding="utf-8"), file.name
    written = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert written["target"]["url"].startswith("https://host:8000/v1?api_key=")
    assert written["target"]["headers"]["Accept"] == "*/*"
    assert written["commands"][0][-2:] == ["--input-tokens", "8"]


def test_secrets_are_known_by_name_and_shape_without_being_told(tmp_path):
    target = {"url": "https://bob:hunter22@host/x", "api_key": "abc", "hf_token": "xyz9"}
    commands = [["--api-key", "abc"], ["-H", "Authorization: Basic Ym9iOmh1bnRlcjI="]]
    manifest = replace(_manifest(), target=TargetFacts.from_json(target), commands=commands)
    RunStore.create(tmp_path / "run", manifest).close()
    text = (tmp_path / "run" / "manifest.json").read_text(encoding="utf-8")
    for secret in ("hunter22", '"abc"', "xyz9", "Ym9iOmh1bnRlcjI="):
        assert secret not in text


def test_a_resumed_run_remembers_both_commands(tmp_path):
    RunStore.create(tmp_path / "run", _manifest()).close()
    command = ["lmi-bench", "sweep", "--resume"]
    RunStore.resume(tmp_path / "run", replace(_manifest(), commands=[command])).close()
    assert load_run(tmp_path / "run").manifest.commands == [["lmi-bench"], command]


def test_a_run_of_a_newer_version_is_refused_with_both_numbers(tmp_path):
    RunStore.create(tmp_path / "run", _manifest(schema_version=99)).close()
    with pytest.raises(InputError, match=r"99.*up to 1"):
        load_run(tmp_path / "run")


def test_a_folder_without_a_manifest_is_no_run(tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json"):
        load_run(tmp_path)


def test_the_manifest_names_host_and_versions(tmp_path):
    with RunStore.create(tmp_path / "run", _manifest()) as store:
        assert store.manifest.host["cpus"] == os.cpu_count()
        assert store.manifest.host["memory_bytes"] > 2**20
        assert "orjson" in store.manifest.versions


def test_a_manifest_is_written_back_as_it_was_read():
    """Of every version: keys in their order, those that this version does not know, none added."""
    golden = Path(__file__).parents[1] / "golden" / "outputs"
    contents = [json.loads(path.read_bytes()) for path in golden.rglob("manifest.json")]
    assert contents
    contents = [content | {"host": {}, "versions": {"torch": "2"}} for content in contents]
    contents += [{"schema_version": 1, "later": [1]}, {"scenario": {"model": "m", "x": None}}]
    for content in contents:
        assert json.dumps(Manifest.from_json(content).to_json()) == json.dumps(content)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ({"scenario": []}, r"manifest\.json: scenario must be an object, not \[\]"),
        ({"scenario": {"slo": "ttft"}}, "json: scenario: slo must be a list of its kind of values, not 'ttft'"),
        ({"target": {"replicas": "2"}}, "json: target: replicas must be a whole number, not '2'"),
        ({"target": {"scheduler": {}}}, "json: target: scheduler: it has no `num_blocks`"),
    ],
)
def test_a_damaged_manifest_names_the_file_and_the_field(tmp_path, damage, line):
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 1} | damage))
    with pytest.raises(InputError, match=line):
        load_run(tmp_path)


def test_what_only_some_answers_have_comes_back_and_costs_the_others_nothing(tmp_path):
    stages = {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3}
    answer = replace(RECORD.exchange, first_answer_s=0.25, reasoning_tokens=1, streamed=False, **stages)
    thinking = replace(RECORD, request_id=1, exchange=answer)
    with RunStore.create(tmp_path / "run", _manifest()) as store:
        store.append_level([RECORD, thinking], _level(0))
    plain, answer = (record.exchange for record in load_run(tmp_path / "run").records[0])
    assert (plain.first_answer_s, plain.streamed) == (None, True)
    assert (answer.first_answer_s, answer.reasoning_tokens, answer.streamed) == (0.25, 1, False)
    assert (plain.queue_s, plain.prefill_s, plain.decode_s) == (None, None, None)
    assert (answer.queue_s, answer.prefill_s, answer.decode_s) == (0.1, 0.2, 0.3)
    line = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()[0]
    assert "streamed" not in line
    assert "queue_s" not in line
