"""A model folder of .bin files as safetensors: converted, read again and compared."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.jobs.settings.convert import ConvertSettings


@dataclass(frozen=True, slots=True)
class Converted:
    """The new folder, and the SHA-256 over the weights, which both folders share."""

    folder: Path
    sha256: str


def convert(settings: ConvertSettings, listener: Listener = SILENT) -> Converted:
    """Convert, read the result again, and compare; nothing is left of one that failed."""
    try:
        from lmi_bench.engine.torch_backend.convert import convert as write
        from lmi_bench.engine.torch_backend.convert import weights_hash
    except ImportError as exc:
        raise InputError(
            f"the conversion needs {exc.name}: pip install 'lmi-bench[engine]'"
        ) from exc
    folder, out = settings.folder, settings.out
    existed = out.exists()
    try:
        title = f"converting {folder.name}"
        before = write(folder, out, progress=partial(listener.progress, title))
        listener.note("reading the new files ...")
        after = weights_hash(out)
        if after != before:
            raise LmiBenchError(f"{out} holds other weights ({after}) than {folder} ({before})")
    except BaseException:
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
        raise
    return Converted(out, after)
