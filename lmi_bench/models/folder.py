"""Checks and reads model folders, and makes folders with a longer context; runs no code from them.

Rope scaling extends a model's context without training: a new folder has links to the model's files
and a config.json with another rope scaling.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.durable import parsed_json, read_text, write_text
from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.json_value import JsonValue
from lmi_bench.core.native_build import default_cache_dir
from lmi_bench.models.hf_config import shape_from_hf_config
from lmi_bench.models.shape import ModelShape

_ONCE_CUSTOM: Final = tuple(f"{name}ForCausalLM" for name in ("Falcon", "RW", "Phi3", "DeepseekV3"))
"""Published with custom code, which transformers and this engine no longer need."""


TRAINED_NAMES: Final = ("demo-text", "demo-text-draft")
"""The trained pair in the box: a model of bytes and its draft (benchmarks/train_pair.py)."""


def trained_folder(name: str) -> Path | None:
    """The folder of one of `TRAINED_NAMES`; None for any other name."""
    return Path(__file__).with_name("trained") / name if name in TRAINED_NAMES else None


def held_out_text(name: str) -> Path | None:
    """Text of the kind that a trained model in the box has learnt, without it; else None."""
    return Path(__file__).with_name("trained") / "held_out.txt" if name in TRAINED_NAMES else None


@dataclass(frozen=True, slots=True)
class _Totals(JsonValue):
    total_size: float | None = None


@dataclass(frozen=True, slots=True)
class TensorIndex(JsonValue):
    """An index beside the files of a large model: the file of each tensor, and their bytes."""

    weight_map: Mapping[str, str]
    metadata: _Totals | None = None


def is_model_folder(path: Path) -> bool:
    """True if the path is a readable folder with a config.json."""
    try:
        return (path / "config.json").is_file()
    except OSError:  # a name longer than the system allows, or a folder without permission
        return False


def folder_name(folder: Path) -> str:
    """The model's name: its folder's name as given, with `.` and `..` resolved."""
    return folder.name if folder.name not in ("", "..") else folder.resolve().name


def make_new_folder(path: Path) -> None:
    """Create a folder and its parents; InputError if it exists or cannot be created."""
    try:
        path.mkdir(parents=True)
    except OSError as exc:
        raise InputError(f"{path} cannot be created: {file_reason(exc)}; name another folder") from exc


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; InputError if it is missing, unreadable or invalid."""
    if not is_model_folder(folder):
        raise InputError(f"{folder} is not a folder with a readable config.json: give a Hugging Face model's")
    return read_object(folder / "config.json")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError if the file cannot be read or holds none."""
    try:
        content = parsed_json(read_text(path))
    except ValueError as exc:
        raise InputError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object")
    return content


def optional_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    return read_object(path) if path.is_file() else {}


def config_file(name: str) -> Path | None:
    """The config.json that a name means, a folder's or the file itself; None if it means none."""
    path = Path(name)
    if is_model_folder(path):
        return path / "config.json"
    return path if path.suffix == ".json" and path.is_file() else None


def check_loadable(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError if the model needs custom code, or its weights' format is no object."""
    stored = config.get("quantization_config")
    if stored and not isinstance(stored, Mapping):
        raise InputError(f"{folder / 'config.json'}: quantization_config {stored!r} is no object")
    named = config.get("architectures") or [""]
    needs_code = bool(config.get("auto_map")) and named[0] not in _ONCE_CUSTOM
    if needs_code or config.get("trust_remote_code"):
        raise InputError(
            f"{folder / 'config.json'} needs custom code (auto_map, trust_remote_code), and "
            "lmi-bench runs no code from a model folder: use a model that transformers supports"
        )


def shape_of_folder(folder: Path) -> ModelShape:
    """The shape of the model in a folder, named after the folder; may raise InputError."""
    return shape_from_hf_config(folder.resolve().name, read_config(folder))


KINDS: Final = ("linear", "dynamic", "yarn")
_TRAINED: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """factor  wanted context length / trained context length, above 1"""

    kind: str
    factor: float

    def __str__(self) -> str:
        return f"{self.kind}-{self.factor:g}"


def parse_rope_scaling(text: str) -> RopeScaling:
    """Parse text such as `linear:2`; InputError for anything else."""
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
    """The config with this scaling instead of its own; by transformers' convention
    max_position_embeddings is then the trained length. Gemma 3's layers with a window keep theirs."""
    if isinstance(text := config.get("text_config"), Mapping):  # of a model that reads images as well
        return {**config, "text_config": with_rope_scaling(text, scaling)}
    changed = dict(config)
    own = dict(changed.pop("rope_parameters", None) or changed.pop("rope_scaling", None) or {})
    changed.pop("rope_scaling", None)
    near = own.pop("sliding_attention", None)
    own |= own.pop("full_attention", None) or {}
    trained = own.get(_TRAINED) or changed.get(_TRAINED) or changed.get("max_position_embeddings")
    if not isinstance(trained, int):
        raise InputError("config.json has no max_position_embeddings: no length to scale")
    rope = {"rope_type": scaling.kind, "factor": scaling.factor, _TRAINED: trained}
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := own.get(key) or changed.get(key)) is not None:
            rope[key] = changed[key] = value
    changed["rope_scaling"] = rope
    if near:
        changed["rope_parameters"] = {"full_attention": rope, "sliding_attention": near}
    changed["max_position_embeddings"] = trained
    return changed


def rope_scaled_folder(folder: Path, scaling: RopeScaling) -> Path:
    """Make a folder `NAME-linear-2`, in the user's cache, that any back end loads like another."""
    config = json.dumps(with_rope_scaling(read_config(folder), scaling), indent=2)
    source = folder.resolve()
    digest = hashlib.sha256(f"{source}\n{config}".encode()).hexdigest()[:16]
    made = default_cache_dir("rope") / digest / f"{folder.name}-{scaling}"
    write_text(made / "config.json", config + "\n")
    for entry in made.iterdir():
        if entry.is_symlink() and not entry.exists():
            entry.unlink(missing_ok=True)
    for entry in source.iterdir():
        if entry.name != "config.json":
            with suppress(FileExistsError):  # of an earlier call, or one at the same time
                (made / entry.name).symlink_to(entry)
    return made
