"""Shapes of decode steps, and steps compiled ahead of time: shared libraries with a manifest.

A compiled or captured step has fixed sizes. A step of another size is padded to the cheapest shape
that covers it, so nothing is compiled while requests wait; a step that no shape covers, and every
step with a prompt, runs eagerly.

Torch's AOTInductor exports and compiles a step, one package per shape, without weights. A package
is code with the loading user's rights, so it is loaded only if the manifest has its hash and every
field of the manifest's key equals this engine's; nothing in the folder is unpickled. The hash
detects a damaged or mixed-up folder, not a malicious one: use only folders from trusted sources.
"""

import fcntl
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.durable import LOCK, open_plain, write_inside
from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.native_build import default_cache_dir
from lmi_bench.models.folder import read_object

_SHAPE: Final = re.compile(r"([0-9]+)x([0-9]+)")
_DEFAULT_SEQUENCES: Final = (1, 4, 16)
_GRAPH_SEQUENCES: Final = (1, 2, 4, 8, *range(16, 257, 16))


@dataclass(frozen=True, slots=True, order=True)
class StaticShape:
    """Number of decoding sequences, and their maximum context including the new token."""

    sequences: int
    context_tokens: int

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.context_tokens < 1:
            raise InputError(f"shape {self}: both numbers must be at least 1")

    def __str__(self) -> str:
        return f"{self.sequences}x{self.context_tokens}"


def parse_shapes(text: str) -> tuple[StaticShape, ...]:
    """Parse `1x512,8x512`: SEQUENCESxTOKENS, comma-separated; raises InputError otherwise."""
    found = []
    for part in text.split(","):
        match = _SHAPE.fullmatch(part.strip())
        if match is None:
            raise InputError(f"shape {part.strip()!r}: write SEQUENCESxTOKENS, such as 1x512,8x512")
        found.append(StaticShape(int(match[1]), int(match[2])))
    return tuple(sorted(set(found)))


def default_shapes(*, max_tokens: int) -> tuple[StaticShape, ...]:
    """Shapes for compiled steps, which read padded contexts: 1, 4 and 16 sequences, each with a
    quarter and all of the maximum length."""
    contexts = (-(-max_tokens // 4), max_tokens)
    return tuple(StaticShape(*size) for size in product(_DEFAULT_SEQUENCES, contexts))


def graph_shapes(*, most_sequences: int, max_tokens: int) -> tuple[StaticShape, ...]:
    """Shapes for captured steps whose attention reads no padding: one context length, several
    batch sizes."""
    buckets = [n for n in _GRAPH_SEQUENCES if n < most_sequences]
    buckets.append(min(most_sequences, _GRAPH_SEQUENCES[-1]))
    return tuple(StaticShape(sequences, max_tokens) for sequences in buckets)


def fitted(shapes: Iterable[StaticShape], *, max_tokens: int, block_size: int) -> tuple[StaticShape, ...]:
    """Round shapes up to whole blocks; raises InputError if one exceeds the maximum length."""
    whole = set()
    for shape in shapes:
        if shape.context_tokens > rounded_up(max_tokens, block_size):
            raise InputError(
                f"shape {shape}: a sequence has at most {max_tokens:,} tokens here; lower the "
                "second number, or raise the model's length or the cache"
            )
        whole.add(StaticShape(shape.sequences, rounded_up(shape.context_tokens, block_size)))
    return tuple(sorted(whole))


def rounded_up(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def covering(shapes: Sequence[StaticShape], sequences: int, context_tokens: int) -> StaticShape | None:
    """The shape with the fewest padded tokens that covers the step; None if none does."""
    fit = [s for s in shapes if sequences <= s.sequences and context_tokens <= s.context_tokens]
    return min(fit, key=lambda one: (one.sequences * one.context_tokens, one), default=None)


MANIFEST: Final = "manifest.json"
FORMAT: Final = 1  # increment when the inputs or outputs of a compiled step change

Compile = Callable[[StaticShape, Path], None]  # compiles the step of a shape into a file


ArtefactKey = Mapping[str, str | int]
"""Everything a compiled step depends on, except its shape; `step.key_of` makes it.

format           of inputs and outputs; tensor_parallel, quantize, block_size, torch: as named
model            hash of the layers: sizes, norms, windows, rotary positions; not of weights
weights, compute number formats of storage and products; kv_dtype: format of the cache
device           processor and instruction set, or the GPU's name and compute capability
settings         compiler settings
"""


@dataclass(frozen=True, slots=True)
class Artefact:
    """A matching folder: the packages by shape.

    compile_s  time in s that compiling them took, then or now
    found      True if all of them existed already
    """

    folder: Path
    packages: Mapping[StaticShape, Path]
    compile_s: float
    found: bool = True


def open_artefact(folder: Path, key: ArtefactKey) -> Artefact:
    """Check a folder's manifest against a key and its packages against their hashes. Raises
    InputError with the differing fields, or with the file whose hash differs."""
    manifest = _read_manifest(folder)
    other = manifest["key"]
    different = [f"{name} {other.get(name)!r}, here {mine!r}" for name, mine in key.items() if other.get(name) != mine]
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
    tell: Callable[[int, int], None] | None = None,
) -> Artefact:
    """Compile the packages missing in a folder; the manifest is written after each package.

    tell  called with (shapes done, all shapes)

    Safe for concurrent processes: the second one waits and finds the packages. Raises InputError if
    the folder has packages with another key, or cannot be written.
    """
    check_writable(folder)
    with open(folder / LOCK, "ab", opener=open_plain) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process, even a killed one
        for left in folder.glob(".compiling-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        entries: dict[str, Any] = {}
        if (folder / MANIFEST).is_file():
            open_artefact(folder, key)
            entries = _read_manifest(folder)["shapes"]
        found = {str(shape) for shape in shapes} <= entries.keys()
        for done, shape in enumerate(shapes):
            if tell is not None:
                tell(done, len(shapes))
            if str(shape) in entries:
                continue
            entries[str(shape)] = _compile_one(folder, shape, compile_step)
            content = {"key": key, "shapes": entries}
            write_inside(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
        if tell is not None:
            tell(len(shapes), len(shapes))
        return replace(open_artefact(folder, key), found=found)


def check_writable(folder: Path) -> None:
    """Create the folder if needed; raises InputError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        open(folder / LOCK, "ab", opener=open_plain).close()
    except OSError as exc:
        raise InputError(f"{folder} cannot be written: {file_reason(exc)}; name another folder") from exc


def default_folder(key: ArtefactKey) -> Path:
    """The folder in the user's cache for compiled steps with this key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return default_cache_dir("compiled") / digest[:20]


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
        content = read_object(path)
        entries = [(entry["file"], entry["sha256"], float(entry["compile_s"])) for entry in content["shapes"].values()]
        known = isinstance(content["key"], dict) and bool(entries)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(f"{path} is not a manifest of compiled steps: {exc!r}") from exc
    if not known:
        raise InputError(f"{path} lists no compiled steps")
    return content


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
