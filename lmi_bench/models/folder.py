"""Checks a model folder and reads its config.json; code in the folder is never run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.models.hf_config import shape_from_hf_config
from lmi_bench.models.shape import ModelShape

_ONCE_OF_ITS_OWN: Final = ("FalconForCausalLM", "RWForCausalLM")
"""Published with custom code, which transformers and this engine no longer need."""


def is_model_folder(path: Path) -> bool:
    """True if the path is a folder with a config.json."""
    return (path / "config.json").is_file()


def folder_name(folder: Path) -> str:
    """The model's name: its folder's name as given, with `.` and `..` resolved."""
    return folder.name if folder.name not in ("", "..") else folder.resolve().name


def make_new_folder(path: Path) -> None:
    """Create a folder and its parents; InputError if it exists or cannot be created."""
    try:
        path.mkdir(parents=True)
    except OSError as exc:
        raise InputError(
            f"{path} cannot be created: {file_reason(exc)}; name another folder"
        ) from exc


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; InputError if it is missing or invalid."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give a model folder with a config.json")
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json: give a Hugging Face model folder")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError if the file holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object")
    return content


def check_loadable(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError if the model needs custom code."""
    named = config.get("architectures") or [""]
    needs_code = bool(config.get("auto_map")) and named[0] not in _ONCE_OF_ITS_OWN
    if needs_code or config.get("trust_remote_code"):
        raise InputError(
            f"{folder / 'config.json'} needs custom code (auto_map, trust_remote_code), and "
            "lmi-bench runs no code from a model folder: use a model that transformers supports"
        )


def shape_of_folder(folder: Path) -> ModelShape:
    """The shape of the model in a folder, named after the folder; may raise InputError."""
    return shape_from_hf_config(folder.resolve().name, read_config(folder))
