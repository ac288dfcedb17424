"""What a model folder says about itself: its config.json, read before any weight is touched.

No code of a folder is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.models.hf_config import shape_from_hf_config
from lmi_bench.models.shape import ModelShape

_ONCE_OF_ITS_OWN: Final = ("FalconForCausalLM", "RWForCausalLM")
"""Published with code beside them that transformers and this engine have since had themselves."""


def is_model_folder(path: Path) -> bool:
    """Whether there is a folder with a config.json."""
    return (path / "config.json").is_file()


def folder_name(folder: Path) -> str:
    """What a model is called after its folder: the name it was given by, `.` and `..` resolved."""
    return folder.name if folder.name not in ("", "..") else folder.resolve().name


def make_new_folder(path: Path) -> None:
    """Make a folder and those above it; InputError where it exists or cannot be made."""
    try:
        path.mkdir(parents=True)
    except OSError as exc:
        raise InputError(f"{path} cannot be made: {file_reason(exc)}; name another folder") from exc


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; InputError where it is absent or broken."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give a model folder with a config.json")
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json: give a Hugging Face model folder")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; InputError where it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object")
    return content


def check_loadable(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError where the model needs code of its own."""
    named = config.get("architectures") or [""]
    needs_code = bool(config.get("auto_map")) and named[0] not in _ONCE_OF_ITS_OWN
    if needs_code or config.get("trust_remote_code"):
        raise InputError(
            f"{folder / 'config.json'} asks for code of its own (auto_map, trust_remote_code): "
            "lmi-bench runs no code from a model folder; use a model that transformers itself knows"
        )


def shape_of_folder(folder: Path) -> ModelShape:
    """The shape of the model in a folder, named after it; InputError where it cannot be read."""
    return shape_from_hf_config(folder.resolve().name, read_config(folder))
