"""A conversion, shown while it runs and checked at its end."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from lmi_bench.cli.console import note, progress, say
from lmi_bench.core.errors import InputError, LmiBenchError


def run_convert(folder: Path, out: Path) -> None:
    """Convert, read the result again, and compare; nothing is left of one that failed."""
    try:
        from lmi_bench.engine.torch_backend.convert import convert, weights_hash
    except ImportError as exc:
        raise InputError(
            f"the conversion needs {exc.name}: pip install 'lmi-bench[engine]'"
        ) from exc
    existed = out.exists()
    try:
        with progress() as report:
            before = convert(folder, out, progress=partial(report, f"converting {folder.name}"))
        note("reading the new files ...")
        after = weights_hash(out)
        if after != before:
            raise LmiBenchError(f"{out} holds other weights ({after}) than {folder} ({before})")
    except BaseException:
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
        raise
    say(f"{out}: the same weights, sha256 {after}")
