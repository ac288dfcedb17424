"""Compiled steps in a folder: refused unless everything fits, found again, and lossless."""

from __future__ import annotations

import asyncio
import json
import mmap
from pathlib import Path

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED
from lmi_bench.engine.torch_backend.static.artefact import (
    MANIFEST,
    StaticShape,
    default_folder,
    make_artefact,
    open_artefact,
    parse_shapes,
)
from lmi_bench.engine.torch_backend.static.build import StepSettings
from lmi_bench.targets.back_ends import BackEnd, step_settings
from tests.engine.torch_backend.test_runner import PROMPT, Steps, entry

KEY = {
    "format": 1,
    "model": "a",
    "tensor_parallel": 1,
    "weights": "bfloat16",
    "compute": "float32",
    "kv_dtype": "bfloat16",
    "quantize": "none",
    "block_size": 64,
    "device": "x86_64, AVX2",
    "torch": "2.13.0",
    "settings": "{}",
}
SHAPES = parse_shapes("1x64,4x64")


class Compiler:
    """Writes the shape's name where a package would be."""

    def __init__(self) -> None:
        self.asked: list[StaticShape] = []

    def __call__(self, shape, path):
        self.asked.append(shape)
        path.write_text(f"package of {shape}", encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    make_artefact(tmp_path / "made", KEY, SHAPES, Compiler())
    return tmp_path / "made"


def test_a_lock_that_is_a_link_is_refused_and_its_file_kept(tmp_path):
    (tmp_path / "notes").write_text("kept")
    (tmp_path / ".lock").symlink_to(tmp_path / "notes")
    with pytest.raises(InputError, match="is a symbolic link"):
        make_artefact(tmp_path, KEY, SHAPES, Compiler())
    assert (tmp_path / "notes").read_text() == "kept"


@pytest.mark.parametrize("field", sorted(KEY))
def test_any_field_that_differs_is_a_refusal_that_names_it(folder, field):
    value = KEY[field]
    other = KEY | {field: value + 1 if isinstance(value, int) else value + "!"}
    with pytest.raises(InputError, match=f"another engine: {field} ") as refused:
        open_artefact(folder, other)
    assert "\n" not in str(refused.value)
    assert default_folder(other) != default_folder(KEY)


def test_an_equal_key_is_a_hit(folder):
    found = open_artefact(folder, dict(KEY))
    assert sorted(found.packages) == list(SHAPES)


def test_what_is_there_is_not_compiled_again_and_what_is_missing_is(folder):
    compiler = Compiler()
    make_artefact(folder, KEY, SHAPES, compiler)
    assert compiler.asked == []
    found = make_artefact(folder, KEY, parse_shapes("4x64,8x64"), compiler)
    assert compiler.asked == [StaticShape(8, 64)]
    assert len(found.packages) == 3


def test_what_a_killed_process_left_is_taken_away(folder):
    left = folder / ".compiling-abc"
    left.mkdir()
    (left / "step-8x64.pt2").write_bytes(b"half")
    make_artefact(folder, KEY, SHAPES, Compiler())
    assert not left.exists()
    assert len(open_artefact(folder, KEY).packages) == len(SHAPES)


def test_a_folder_of_another_key_is_not_written_over(folder):
    with pytest.raises(InputError, match="another engine"):
        make_artefact(folder, KEY | {"torch": "9"}, SHAPES, Compiler())


def test_a_changed_package_is_refused(folder):
    package = folder / "step-4x64.pt2"
    package.write_text("something else", encoding="utf-8")
    with pytest.raises(InputError, match=r"step-4x64\.pt2 is not the file in its manifest"):
        open_artefact(folder, KEY)
    package.unlink()
    with pytest.raises(InputError, match=r"step-4x64\.pt2 is missing"):
        open_artefact(folder, KEY)


def test_a_manifest_cannot_name_a_file_elsewhere(folder, tmp_path):
    (tmp_path / "outside").write_text("package of 1x64", encoding="utf-8")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["shapes"]["1x64"]["file"] = "../outside"
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(InputError, match="is missing"):
        open_artefact(folder, KEY)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": {}, "shapes": {}}', '{"shapes": 3}'])
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        open_artefact(tmp_path, KEY)
    assert "\n" not in str(refused.value)


def test_a_killed_compilation_leaves_what_was_done(tmp_path):
    class Killed(Compiler):
        def __call__(self, shape, path):
            if shape == SHAPES[1]:
                raise KeyboardInterrupt
            super().__call__(shape, path)

    with pytest.raises(KeyboardInterrupt):
        make_artefact(tmp_path, KEY, SHAPES, Killed())
    compiler = Compiler()
    make_artefact(tmp_path, KEY, SHAPES, compiler)
    assert compiler.asked == [SHAPES[1]]


def resident_bytes() -> int:
    """Memory of this process that the system has given pages to; 0 where /proc does not say."""
    stated = Path("/proc/self/statm")
    return int(stated.read_text().split()[1]) * mmap.PAGESIZE if stated.is_file() else 0


def test_compiled_steps_give_transformers_tokens_and_are_found_again(make_llama, tmp_path):
    """The whole way, compiler included; another cache format and another size are refused.

    A step writes its own tokens and no copy of the cache: 200,000 blocks of 2 KiB are memory that
    nobody has touched yet, and it stays so.
    """
    llama = make_llama(num_hidden_layers=1)
    settings = StepSettings(compiled=True, out=tmp_path / "out", shapes=(StaticShape(2, 16),))
    made = Steps(llama.folder, num_blocks=200_000, steps=settings)
    assert not made.executor.prepared.artefact.found
    (difference,) = asyncio.run(made.executor.compare_prepared())
    asyncio.run(made.executor.close())
    assert difference.largest < 1e-4 < difference.spread
    again = Steps(llama.folder, num_blocks=200_000, steps=StepSettings(artefact=tmp_path / "out"))
    assert again.executor.prepared.artefact.found
    got = list(again.tokens(entry(1, PROMPT, 0, (30, 5, 39)))[0])
    before_bytes = resident_bytes()
    for position in range(9, 12):
        got += again.tokens(entry(1, (LAST_SAMPLED,), position))[0]
    assert resident_bytes() - before_bytes < again.executor.kv_cache_bytes / 8
    forward = again.executor._ranks.runner._forward
    asyncio.run(again.executor.close())
    assert got == llama.greedy(PROMPT, 4).token_ids
    assert forward.static_steps == 3
    for changed in ({"kv_dtype": "bfloat16"}, {"block_size": 8}):
        with pytest.raises(InputError, match=f"another engine: {next(iter(changed))}"):
            Steps(llama.folder, **changed, steps=StepSettings(artefact=tmp_path / "out"))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_place_that_is_no_folder_is_refused_in_one_line(tmp_path, name):
    """Before a model is loaded for it: `step_settings` asks first."""
    (tmp_path / "file").write_text("in the way")
    settings = EngineSection(compile=True)
    with pytest.raises(InputError, match="cannot be written"):
        step_settings(settings, BackEnd(), out=tmp_path / name)
