"""What a model folder says about itself: config.json, read and checked before any weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from lmi_bench.errors import InputError

_ONCE_OF_ITS_OWN: Final = ("FalconForCausalLM", "RWForCausalLM")
"""Published with code beside them that transformers and this engine have since had themselves."""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises InputError where it is absent or broken, or where the model needs code of its own
    (`auto_map`) or has quantized weights. No code of a folder is ever run.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give a model folder with a config.json")
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json: give a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a JSON object")
    named = config.get("architectures") or [""]
    needs_code = bool(config.get("auto_map")) and named[0] not in _ONCE_OF_ITS_OWN
    if needs_code or config.get("trust_remote_code"):
        raise InputError(
            f"{path} asks for code of its own (auto_map, trust_remote_code): lmi-bench runs no "
            "code from a model folder; use a model that transformers itself knows"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise InputError(f"{path}: weights quantized with {method!r} cannot be loaded")
    return config
