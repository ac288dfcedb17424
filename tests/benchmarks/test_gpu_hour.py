"""The hour on a GPU goes on where it was cut, and a lost GPU costs one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_hour
from benchmarks.engine_gpu import Page
from benchmarks.gpu_hour import LOST_GPU, MOST_STARTS, Stage, run


def stage(place: Path, name: str, code: str, **changes) -> Stage:
    """Appends a letter to the file `ran` and then does what `code` says."""
    script = place / f"{name}.py"
    script.write_text(f"import sys, time\nopen({str(place / 'ran')!r}, 'a').write({name!r})\n{code}\n")
    return Stage(name, (str(script),), **{"share": 1.0} | changes)


def ran(place: Path) -> str:
    return (place / "ran").read_text()


def test_what_has_ended_does_not_run_again_and_a_failure_stops_nothing(tmp_path):
    stages = [stage(tmp_path, "a", "sys.exit(1)"), stage(tmp_path, "b", "print('good')")]
    assert run(stages, tmp_path / "state", 60) == {"a": 1, "b": 0}
    assert (tmp_path / "state" / "b.txt").read_text() == "good\n"
    more = [*stages, stage(tmp_path, "c", "")]
    assert run(more, tmp_path / "state", 60) == {"a": 1, "b": 0, "c": 0}
    assert ran(tmp_path) == "abc"


def test_a_stage_that_lost_its_gpu_starts_again_and_others_do_not(tmp_path):
    code = f"sys.exit({LOST_GPU} if open({str(tmp_path / 'ran')!r}).read().count('a') < 3 else 0)"
    assert run([stage(tmp_path, "a", code, resumes=True)], tmp_path / "one", 60) == {"a": 0}
    assert ran(tmp_path) == "aaa"
    plain = [stage(tmp_path, "b", f"sys.exit({LOST_GPU})")]
    assert run(plain, tmp_path / "two", 60) == {"b": LOST_GPU}
    forever = [stage(tmp_path, "c", f"sys.exit({LOST_GPU})", resumes=True)]
    assert run(forever, tmp_path / "three", 60) == {}
    assert ran(tmp_path) == "aaab" + "c" * MOST_STARTS


def test_a_stage_that_is_cut_goes_on_next_time_unless_it_would_be_cut_again(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_hour, "run_one", lambda s, _, limit_s: asked.append((s.name, limit_s)))
    tests, tables = stage(tmp_path, "a", "", share=0.1), stage(tmp_path, "b", "", resumes=True)
    assert run([tests, tables], tmp_path / "state", 100) == {"a": 124}
    assert run([tests, tables], tmp_path / "state", 100) == {"a": 124}
    assert [name for name, _ in asked] == ["a", "b", "b"]
    assert asked[0][1] == pytest.approx(10)


def test_tables_of_the_same_code_and_gpu_are_not_made_again(tmp_path):
    made = []

    def table(name):
        made.append(name)
        if name == "b":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return ["", f"table {name}"]

    def page(key="H100"):
        one = Page(tmp_path / "out", 60, tmp_path / "state.json", key)
        one.model = "m"
        return one

    first = page()
    first.add("a", lambda: table("a"))
    with pytest.raises(SystemExit) as lost:
        first.add("b", lambda: table("b"))
    assert lost.value.code == LOST_GPU
    second = page()
    assert second.has("a")
    for name in "abc":
        second.add(name, lambda name=name: table(name))
    assert made == ["a", "b", "c"]
    text = (tmp_path / "out" / "engine_gpu.md").read_text()
    assert "table a" in text
    assert "b: failed with RuntimeError: CUDA error: an illegal memory access" in text
    assert not page("H200").has("a")
    assert json.loads((tmp_path / "state.json").read_text())["key"] == "H100"
