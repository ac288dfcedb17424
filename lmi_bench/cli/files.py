"""Writing a command's own file: whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lmi_bench.core.errors import InputError


def write_text(path: Path, text: str) -> None:
    """Write a file at once, making its folder; a failure leaves the old one as it was.

    Raises InputError where the path cannot be written.
    """
    unfinished = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as exc:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {exc.strerror}") from exc
