"""Reads what `recommend --json` wrote, for the commands that go on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.core.errors import InputError

_NEEDED = ("recommended", "model", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class SavedRecommendation:
    """A file's answer.

    best              the recommended candidate
    model             as it was asked for
    profile_document  the profile that it was planned with; None where the file has none
    """

    answer: Recommendation
    best: Candidate
    model: str
    profile_document: Mapping[str, Any] | None


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


def load_recommendation(path: Path) -> SavedRecommendation:
    """The file's answer, with a recommended candidate in it; raises InputError else."""
    content = read_recommendation(path)
    if content["recommended"] is None:
        raise InputError(f"{path} recommends nothing: no candidate keeps its limits")
    try:
        answer = Recommendation.from_json(content)
    except InputError as exc:
        raise InputError(f"{path}: {exc}") from exc
    assert answer.recommended is not None
    document = content.get("profile_document")
    return SavedRecommendation(
        answer=answer,
        best=answer.recommended,
        model=str(content.get("model_as_named") or answer.question.model),
        profile_document=document if isinstance(document, Mapping) else None,
    )
