"""Pickled weights become safetensors with the same hash, and pickles that are more are refused."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.convert import convert, weights_hash
from tests.engine.torch_backend.tiny_models import TinyModel


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """One model as safetensors, as one .bin, and as .bin shards."""
    root = tmp_path_factory.mktemp("formats")
    model = TinyModel(root / "safe", "Llama").model
    single, shards = root / "single", root / "shards"
    for folder in (single, shards):
        folder.mkdir()
        (folder / "config.json").write_text((root / "safe" / "config.json").read_text())
    tensors = dict(model.state_dict())
    torch.save(tensors, single / "pytorch_model.bin")
    halves = [dict(list(tensors.items())[k::2]) for k in range(2)]
    for number, half in enumerate(halves):
        torch.save(half, shards / f"pytorch_model-{number}.bin")
    weight_map = {name: f"pytorch_model-{k}.bin" for k, half in enumerate(halves) for name in half}
    (shards / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return root


@pytest.mark.parametrize("kind", ["single", "shards"])
def test_either_format_has_the_hash_of_the_other(stored, tmp_path, kind):
    assert weights_hash(stored / kind) == weights_hash(stored / "safe")
    out = tmp_path / "converted"
    assert convert(stored / kind, out) == weights_hash(stored / "safe")
    assert weights_hash(out) == weights_hash(stored / "safe")
    assert (out / "config.json").is_file()
    assert not list(out.glob("*.bin*"))


def test_what_torch_wrote_before_1_6_is_read_too(stored, tmp_path):
    """No zip archive, so nothing to map; the message was "no file of tensors alone"."""
    tensors = torch.load(stored / "single" / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert convert(tmp_path, tmp_path / "out") == weights_hash(stored / "safe")


def test_one_changed_bit_changes_the_hash(stored, tmp_path):
    tensors = torch.load(stored / "single" / "pytorch_model.bin")
    tensors["model.norm.weight"][3] += 1e-6
    (tmp_path / "config.json").write_text("{}")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert weights_hash(tmp_path) != weights_hash(stored / "single")


def test_tensors_that_share_memory_are_written_each(tmp_path):
    folder, out = tmp_path / "tied", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    rows = torch.arange(6.0).view(2, 3)
    torch.save({"embed": rows, "head": rows, "turned": rows.T}, folder / "pytorch_model.bin")
    convert(folder, out)
    written = load_file(out / "model.safetensors")
    torch.testing.assert_close(written["head"], written["embed"])
    torch.testing.assert_close(written["turned"], written["embed"].T)


class Command:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (Command(), "not a file of tensors only"),
        ([torch.zeros(1)], "contains a list"),
        ({"w": torch.zeros(1), "step": 3}, "'step' is a int"),
    ],
)
def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(tmp_path, capsys, content, says):
    (tmp_path / "config.json").write_text("{}")
    torch.save(content, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(InputError, match=says):
        convert(tmp_path, tmp_path / "out")
    assert capsys.readouterr().out == ""


def test_a_place_where_no_folder_can_be_made_is_one_line(stored, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be created: Not a directory; name another folder"):
        convert(stored / "single", tmp_path / "file" / "out")
