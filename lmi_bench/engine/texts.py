"""Texts for calibration and perplexity: a file's, or the bundled sample's.

The sample has two parts of the same kinds of prose, so that perplexity is not measured on the
calibration text.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Final

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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"{path}: cannot be read as text: {exc}") from exc
    if path.suffix in (".jsonl", ".json"):
        text = "\n\n".join(texts_of_lines(path, text))
    if not text.strip():
        raise InputError(f"{path}: contains no text")
    return text


def texts_of_lines(path: Path, content: str) -> list[str]:
    """The texts in JSON lines; raises InputError that names the line."""
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts.append(str(row.get("text") or row["prompt"]))
        except (json.JSONDecodeError, KeyError, AttributeError) as exc:
            raise InputError(
                f"{path}, line {number}: expected a JSON object with `text` or `prompt`"
            ) from exc
    return texts
