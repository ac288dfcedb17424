"""When the native step is built, found again, or left to torch with one line that says why."""

from __future__ import annotations

import os
import select
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.core.native_build import STEP, NativeUnavailableError, _run, shipped_name
from lmi_bench.core.native_build import library as build_library
from lmi_bench.core.scenario_sections import EngineSection
from lmi_bench.engine.native_backend.binding import library
from lmi_bench.targets.back_ends import choose_back_end

FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo fake $VERSION; exit 0; fi
echo built >> {log}
{action}
"""
LINK = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'


@pytest.fixture
def fake_compiler(tmp_path):
    """A compiler that notes each build."""

    def make(action: str) -> Path:
        path = tmp_path / "g++"
        path.write_text(FAKE.format(log=tmp_path / "log", action=action))
        path.chmod(0o755)
        return path

    return make


def builds(tmp_path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_library_is_built_once_and_again_for_another_compiler_or_flag(tmp_path, fake_compiler, monkeypatch):
    monkeypatch.setenv("CXX", str(fake_compiler(LINK)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = []
    first = library(tell=told.append)
    assert library(tell=told.append) == first
    assert (builds(tmp_path), len(told)) == (1, 1)
    assert build_library(replace(STEP, flags=(*STEP.flags, "-g"))) != first
    monkeypatch.setenv("VERSION", "2")
    assert library() != first
    assert builds(tmp_path) == 3
    assert {path.suffix for path in first.parent.iterdir()} == {".so"}


def test_a_library_that_came_with_the_wheel_needs_no_compiler_and_fits_its_source_alone(
    tmp_path, fake_compiler, monkeypatch
):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    path = tmp_path / "step.cpp"
    path.write_text("int answer;")
    source = replace(STEP, path=path)
    shipped = tmp_path / shipped_name(source)
    shipped.write_text("library")
    assert build_library(source) == shipped
    monkeypatch.setenv("CXX", "")  # whoever names a compiler means it
    with pytest.raises(NativeUnavailableError, match="no C\\+\\+ compiler is installed"):
        build_library(source)
    monkeypatch.delenv("CXX")
    path.write_text("int another;")
    with pytest.raises(NativeUnavailableError, match="no C\\+\\+ compiler is installed"):
        build_library(source)


def test_a_compiler_that_fails_leaves_nothing_and_says_its_first_error(tmp_path, fake_compiler, monkeypatch):
    broken = fake_compiler("echo 'step.cpp:1: error: no such thing' >&2; exit 1")
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(NativeUnavailableError, match="error: no such thing"):
        library()
    assert list((tmp_path / "cache/lmi-bench/native").iterdir()) == []


def test_a_compiler_that_takes_too_long_ends_with_all_that_it_has_started(tmp_path):
    """Its child, as cc1plus is one of g++, holds a pipe that has no other writer: its end tells."""
    os.mkfifo(pipe := tmp_path / "pipe")
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n(echo begun; exec sleep 60) > {pipe} &\nwait\n")
    compiler.chmod(0o755)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for limit_s in (0.1, 1.0, 10.0):  # until it has begun within its time
        with pytest.raises(NativeUnavailableError, match=r"does not build it: .* timed out"):
            _run([str(compiler)], "does not build it", limit_s)
        if os.read(reader, 16) == b"begun\n":
            break
    assert select.select([reader], [], [], 20)[0]
    assert os.read(reader, 16) == b""
    os.close(reader)


def test_no_compiler_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler is installed"):
        library()


@pytest.mark.parametrize(
    ("settings", "family", "note"),
    [
        ({"backend": "torch"}, "Llama", "step back end torch"),
        (
            {"backend": "native", "quantize": "int8"},
            "Llama",
            "step back end torch; not native, because quantized weights run in torch",
        ),
        ({"backend": "auto"}, "Mixtral", "step back end torch; not native, because it has no step for mixtral"),
        ({"backend": "auto"}, "Falcon", "step back end torch; not native, because it has no step for falcon"),
        ({}, "Mixtral", "step back end torch; not native, because it has no step for mixtral"),
    ],
)
def test_what_the_native_step_cannot_run_is_left_to_torch_with_the_reason(make_model, settings, family, note):
    folder = make_model(family).folder
    back_end = choose_back_end(EngineSection(**settings), [folder], degree=1, block_size=64)
    assert back_end.note.startswith(note)
    assert back_end.facts()["back_end"] == "torch"


def test_ranks_and_small_blocks_are_left_to_torch(make_model):
    folder = make_model("Llama").folder
    settings = EngineSection(backend="auto")
    ranks = choose_back_end(settings, [folder], degree=2, block_size=64)
    assert "a model split over ranks" in ranks.note
    blocks = choose_back_end(settings, [folder], degree=1, block_size=8)
    assert "KV blocks of 8 tokens are not a multiple of 16" in blocks.note


def test_the_native_step_is_taken_and_named_where_it_runs(make_model, compiled):
    folder = make_model("Llama").folder
    back_end = choose_back_end(EngineSection(backend="auto"), [folder], degree=1, block_size=64)
    assert back_end.note == "step back end native"
    assert back_end.facts() == {"back_end": "native", "kernels": compiled.variants()[0]}
