"""A model's positions stretched without training: its folder, with another rope scaling in its
config.json and everything else by link."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import read_config

KINDS: Final = ("linear", "dynamic", "yarn")
_TRAINED: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """factor  the length that the model is to see over the length it was trained on, above 1"""

    kind: str
    factor: float

    def __str__(self) -> str:
        return f"{self.kind}-{self.factor:g}"


def parse_rope_scaling(text: str) -> RopeScaling:
    """`linear:2` and the like; InputError for anything else."""
    kind, _, factor_text = text.partition(":")
    try:
        factor = float(factor_text)
    except ValueError:
        factor = 0.0
    if kind not in KINDS or not 1 < factor <= 1024:
        raise InputError(
            f"rope scaling {text!r}: give {', '.join(KINDS[:-1])} or {KINDS[-1]}, a colon and a "
            "factor above 1, as in linear:2"
        )
    return RopeScaling(kind, factor)


def with_rope_scaling(config: Mapping[str, Any], scaling: RopeScaling) -> dict[str, Any]:
    """The config with this scaling instead of its own; max_position_embeddings is the trained
    length then, by transformers' convention."""
    changed = dict(config)
    own = dict(changed.pop("rope_parameters", None) or changed.pop("rope_scaling", None) or {})
    changed.pop("rope_scaling", None)
    trained = own.get(_TRAINED) or changed.get("max_position_embeddings")
    if not isinstance(trained, int):
        raise InputError("config.json states no max_position_embeddings, so no length to stretch")
    rope = {"rope_type": scaling.kind, "factor": scaling.factor, _TRAINED: trained}
    theta = own.get("rope_theta") or changed.get("rope_theta")
    if theta is not None:
        rope["rope_theta"] = changed["rope_theta"] = theta
    changed["rope_scaling"] = rope
    changed["max_position_embeddings"] = trained
    return changed


def rope_scaled_folder(folder: Path, scaling: RopeScaling, cache_dir: Path | None = None) -> Path:
    """The folder `NAME-linear-2` beside which every back end needs to know nothing.

    cache_dir  None: $XDG_CACHE_HOME/lmi-bench/rope, or ~/.cache/lmi-bench/rope
    """
    config = json.dumps(with_rope_scaling(read_config(folder), scaling), indent=2)
    source = folder.resolve()
    digest = hashlib.sha256(f"{source}\n{config}".encode()).hexdigest()[:16]
    parent = (_default_cache_dir() if cache_dir is None else cache_dir) / digest
    made = parent / f"{folder.name}-{scaling}"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as draft_name:
        draft = Path(draft_name) / made.name
        draft.mkdir()
        (draft / "config.json").write_text(config + "\n", encoding="utf-8")
        for entry in source.iterdir():
            if entry.name != "config.json":
                (draft / entry.name).symlink_to(entry)
        try:
            draft.rename(made)
        except OSError:  # there already: the links may be of an older state of the folder
            _replace_links(draft, made)
    return made


def _replace_links(draft: Path, made: Path) -> None:
    for entry in draft.iterdir():
        entry.replace(made / entry.name)
    for entry in made.iterdir():
        if entry.is_symlink() and not entry.exists():
            entry.unlink()


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lmi-bench" / "rope"
