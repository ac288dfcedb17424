"""Runs that a power loss tore: named when they are read, written whole by `report --repair`."""

from __future__ import annotations

import shutil

import pytest

from lmi_bench.core.durable import lock_folder
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run, repair_run
from tests.end_to_end.commands import lmi_bench

SWEEP = (
    *("sweep", "sim:ml.g5.2xlarge", "--model", "qwen3-8b", "--isl", "16", "--osl", "4"),
    *("--concurrency", "1,2,4", "--requests-per-level", "8"),
)
DAMAGES = {
    "the end is lost": lambda data: data[: len(data) * 2 // 3],
    "the middle is lost": lambda data: data[: len(data) // 2] + data[len(data) // 2 + 200 :],
    "the end is zeros": lambda data: data[: len(data) * 2 // 3] + bytes(len(data) // 3),
    "a line is another's": lambda data: data.replace(b'{"level":0', b'{"level":[]', 1),
}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    lmi_bench(*SWEEP, "--out", run)
    return run


@pytest.mark.parametrize("name", ["requests.jsonl", "levels.jsonl"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_torn_file_is_written_whole_and_kept_beside(whole, name, damage, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    torn = damage((whole / name).read_bytes())
    (run / name).write_bytes(torn)
    said = repair_run(run)
    beside = run / f"{name}.torn"  # two lines may have grown into one that can be read
    assert (beside if beside.exists() else run / name).read_bytes() == torn
    assert said
    assert all("kept; the file as it was is" in line for line in said)
    repaired, before = load_run(run), load_run(whole)
    assert 0 < len(repaired.levels) <= 3
    for level, records in zip(repaired.levels, repaired.records, strict=True):
        assert level == before.levels[level.index]
        assert records == before.records[level.index]
    assert (repaired.knees is None) == (len(repaired.levels) < 3)  # they follow from the levels
    assert repair_run(run) == []


@pytest.mark.parametrize("name", ["knees.json", "slo.json", "cloudwatch.json"])
def test_a_result_that_cannot_be_read_is_put_aside(whole, name, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / name).write_text('[{"rule": ')
    with pytest.raises(InputError, match="--repair"):
        load_run(run)
    (line,) = repair_run(run)
    assert f"the file as it was is {name}.torn" in line
    assert len(load_run(run).levels) == 3


def test_a_level_that_lacks_requests_is_no_result(whole, tmp_path):
    """A cut at the end of a line looks whole; the level's own count tells."""
    run = shutil.copytree(whole, tmp_path / "run")
    lines = (run / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (run / "requests.jsonl").write_bytes(b"".join(lines[:-1]))
    done = lmi_bench("report", run, "-o", tmp_path / "r.html", expect=2)
    assert "of level 3" in done.stderr
    assert "report RUN_DIR --repair" in done.stderr
    done = lmi_bench("report", run, "--repair", "-o", tmp_path / "r.html")
    assert "repaired: " in done.stdout
    assert "levels.jsonl: 2 lines kept" in done.stdout
    lmi_bench(*SWEEP, "--out", run, "--resume")
    again = load_run(run)
    assert again.levels[:2] == load_run(whole).levels[:2]
    assert [level.index for level in again.levels] == [0, 1, 2]
    assert len(again.records[2]) == len(load_run(whole).records[2])
    assert again.knees is not None


def test_nothing_is_repaired_twice_over_or_under_a_running_sweep(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "knees.json").write_text("[")
    (run / "knees.json.torn").write_text("an earlier one")
    with pytest.raises(InputError, match=r"knees\.json\.torn is there already"):
        repair_run(run)
    assert (run / "knees.json.torn").read_text() == "an earlier one"
    (run / "levels.jsonl").write_bytes((run / "levels.jsonl").read_bytes()[:-9])
    before = contents(run)
    with pytest.raises(InputError, match=r"knees\.json\.torn is there already"):
        repair_run(run)
    assert contents(run) == before  # not even the files whose names are free
    (run / "knees.json.torn").unlink()
    (run / "knees.json.torn").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"knees\.json\.torn is there already"):
        repair_run(run)
    assert not (tmp_path / "elsewhere").exists()
    lock_folder(run)
    with pytest.raises(InputError, match="another sweep"):
        repair_run(run)
