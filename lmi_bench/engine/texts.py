"""Texts for calibration and perplexity: a file's, or the bundled sample's.

The sample has two parts of the same kinds of prose, so that perplexity is not measured on the
calibration text.
"""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lmi_bench.core import durable
from lmi_bench.core.errors import InputError

CALIBRATION: Final = 0
EVALUATION: Final = 1


def read_text(path: Path | None, part: int) -> str:
    """The whole text of a file; from JSON lines, their `text` or `prompt`.

    path  None: the sample's part for calibration or for evaluation
    Raises InputError if the file cannot be read or contains no text.
    """
    if path is None:
        sample = files("lmi_bench.engine").joinpath("sample_text.txt").read_text(encoding="utf-8")
        return "\n\n".join(sample.split("\n\n")[part::2])
    text = durable.read_text(path)
    if path.suffix in (".jsonl", ".json"):
        text = "\n\n".join(_texts(durable.json_values(text, path), path))
    if not text.strip():
        raise InputError(f"{path}: contains no text")
    return text


def _texts(rows: Sequence[Any], path: Path) -> Iterator[str]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not (row.get("text") or row.get("prompt")):
            raise InputError(f"{path}: entry {number} needs a `text` or `prompt`")
        yield str(row.get("text") or row["prompt"])
