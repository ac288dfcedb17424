"""Decode steps compiled ahead of time: a folder of shared libraries with a manifest.

Torch's AOTInductor exports and compiles a step, one package per shape, without weights. A package
is code with the loading user's rights, so it is loaded only if the manifest has its hash and every
field of the manifest's key equals this engine's; nothing in the folder is unpickled. The hash
detects a damaged or mixed-up folder, not a malicious one: use only folders from trusted sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.engine.torch_backend.static.shapes import StaticShape, parse_shapes

MANIFEST: Final = "manifest.json"
_LOCK: Final = ".lock"
FORMAT: Final = 1
"""Increment when the inputs or outputs of a compiled step change."""

Compile = Callable[[StaticShape, Path], None]
"""Compiles the step of a shape into a file."""


@dataclass(frozen=True, slots=True)
class ArtefactKey:
    """Everything a compiled step depends on, except its shape.

    model            hash of the layers: sizes, norms, windows, rotary positions; not of weights
    weights, compute number formats of storage and products; kv_dtype: format of the cache
    device           processor and instruction set, or the GPU's name and compute capability
    settings         compiler settings
    """

    model: str
    tensor_parallel: int
    weights: str
    compute: str
    kv_dtype: str
    quantize: str
    block_size: int
    device: str
    torch: str
    settings: str
    format: int = FORMAT

    def digest(self) -> str:
        """Folder name for this key."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Descriptions of the fields that differ in another key."""
        mine = asdict(self)
        return [
            f"{name} {other.get(name)!r}, here {mine[name]!r}"
            for name in mine
            if other.get(name) != mine[name]
        ]


@dataclass(frozen=True, slots=True)
class Artefact:
    """A matching folder: the packages by shape.

    compile_s  time in s that compiling them took
    """

    folder: Path
    packages: Mapping[StaticShape, Path]
    compile_s: float


def open_artefact(folder: Path, key: ArtefactKey) -> Artefact:
    """Check a folder's manifest against a key and its packages against their hashes.

    Raises InputError with the differing fields, or with the file whose hash differs.
    """
    manifest = _read_manifest(folder)
    different = key.differences(manifest["key"])
    if different:
        raise InputError(
            f"{folder} was compiled for another engine: {'; '.join(different)}. Compile it again "
            "with `lmi-bench compile`"
        )
    packages = {}
    compile_s = 0.0
    for text, entry in manifest["shapes"].items():
        (shape,) = parse_shapes(text)
        path = folder / str(entry["file"])
        if path.parent != folder or not path.is_file():
            raise InputError(f"{folder}: {entry['file']} is missing")
        if _sha256(path) != entry["sha256"]:
            raise InputError(f"{path} is not the file in its manifest: its hash differs")
        packages[shape] = path
        compile_s += float(entry["compile_s"])
    return Artefact(folder, packages, compile_s)


def make_artefact(
    folder: Path,
    key: ArtefactKey,
    shapes: Sequence[StaticShape],
    compile_step: Compile,
    told: Callable[[int, int], None] | None = None,
) -> Artefact:
    """Compile the packages missing in a folder; the manifest is written after each package.

    told  called with (shapes done, all shapes)

    Safe for concurrent processes: the second one waits and finds the packages. Raises InputError if
    the folder has packages with another key, or cannot be written.
    """
    check_writable(folder)
    with _locked(folder):
        entries: dict[str, Any] = {}
        if (folder / MANIFEST).is_file():
            open_artefact(folder, key)
            entries = _read_manifest(folder)["shapes"]
        for done, shape in enumerate(shapes):
            if told is not None:
                told(done, len(shapes))
            if str(shape) in entries:
                continue
            entries[str(shape)] = _compile_one(folder, shape, compile_step)
            content = {"key": asdict(key), "shapes": entries}
            _write(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
        if told is not None:
            told(len(shapes), len(shapes))
        return open_artefact(folder, key)


def check_writable(folder: Path) -> None:
    """Create the folder if needed; raises InputError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).open("w").close()
    except OSError as exc:
        raise InputError(
            f"{folder} cannot be written: {file_reason(exc)}; name another folder"
        ) from exc


def default_folder(key: ArtefactKey) -> Path:
    """The folder in the user's cache for compiled steps with this key."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "lmi-bench" / "compiled" / key.digest()


def _compile_one(folder: Path, shape: StaticShape, compile_step: Compile) -> dict[str, Any]:
    path = folder / f"step-{shape}.pt2"
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as place:
        unfinished = Path(place) / path.name
        compile_step(shape, unfinished)
        unfinished.replace(path)
    return {
        "file": path.name,
        "sha256": _sha256(path),
        "bytes": path.stat().st_size,
        "compile_s": time.monotonic() - start_s,
    }


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder} has no {MANIFEST}: give a folder from `lmi-bench compile`")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [(entry["file"], entry["sha256"]) for entry in content["shapes"].values()]
        known = isinstance(content["key"], dict) and bool(entries)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(f"{path} is not a manifest of compiled steps: {exc!r}") from exc
    if not known:
        raise InputError(f"{path} lists no compiled steps")
    found: dict[str, Any] = content
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    """Write atomically: the file appears complete or not at all."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Take the folder's lock; it ends with the process, even a killed one."""
    import fcntl

    with (folder / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
