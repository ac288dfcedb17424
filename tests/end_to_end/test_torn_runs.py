"""Runs that a power loss tore: named when they are read, written whole by `report --repair`."""

from __future__ import annotations

import re
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
    done = lmi_bench("export", run, "--out", tmp_path / "tables")
    assert len((tmp_path / "tables" / "levels.csv").read_text().splitlines()) == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "requests.jsonl has 11 of the 12 requests of level 3: left out;" in line
    assert "report RUN_DIR --repair" in line
    done = lmi_bench(*SWEEP, "--out", run, "--resume", expect=2)  # it would not be measured again
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


CUTS = [
    ("levels.jsonl", lambda data: data[:-9], r"levels\.jsonl: line 3 is cut off"),
    ("levels.jsonl", lambda data: data + bytes(2000), r"levels\.jsonl: line 4 is cut off"),
    ("requests.jsonl", lambda data: data[:-1], r"requests\.jsonl: line \d+ is cut off"),
    ("requests.jsonl", lambda data: data[: len(data) // 2], r"of the \d+ requests of level"),
]


@pytest.mark.parametrize(("name", "cut", "told"), CUTS)
def test_a_run_that_lost_its_end_is_read_up_to_there_and_says_so(whole, tmp_path, name, cut, told):
    """Not while a sweep writes it or goes on with it: then an end that is cut is a beginning."""
    run = shutil.copytree(whole, tmp_path / "run")
    (run / name).write_bytes(cut((whole / name).read_bytes()))
    before = load_run(whole)
    with pytest.warns(UserWarning, match="--repair") as warned:
        found = load_run(run)
    assert any(re.search(told, str(each.message)) for each in warned)
    assert found.levels == before.levels[: len(found.levels)]
    assert found.records == before.records[: len(found.levels)]
    assert found.knees is None  # they follow from all levels
    load_run(run, to_resume=True)
    lock_folder(run)
    load_run(run)


@pytest.mark.parametrize("name", ["requests.jsonl", "levels.jsonl"])
def test_a_run_that_lost_a_whole_file_is_not_read_as_one_without_it(whole, tmp_path, name):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing; .*--repair"):
        load_run(run)
    (run / "requests.jsonl").write_bytes(b"")
    (run / "levels.jsonl").write_bytes((whole / "levels.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"has 0 of the .* requests of level 1, 0 of"):
        load_run(run)
    (run / name).unlink()
    assert repair_run(run)
    assert load_run(run).levels == []


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
