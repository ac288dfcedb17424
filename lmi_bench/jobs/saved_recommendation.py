"""Reads what `recommend --json` wrote, for the commands that go on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_bench.core.errors import InputError

_NEEDED = ("recommended", "model", "input_tokens", "output_tokens")


def read_recommendation(path: Path) -> Mapping[str, Any]:
    """The file's content, whether or not it recommends something; raises InputError else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(content, Mapping) or any(key not in content for key in _NEEDED):
        raise InputError(f"{path} is not a recommendation: write one with recommend --json FILE")
    return content


def load_recommendation(path: Path) -> Mapping[str, Any]:
    """The file's content, with a recommended candidate in it; raises InputError else."""
    content = read_recommendation(path)
    if content["recommended"] is None:
        raise InputError(f"{path} recommends nothing: no candidate keeps its limits")
    if "cost" not in content["recommended"]:
        raise InputError(f"{path} was written by an older version: run recommend --json again")
    return content
