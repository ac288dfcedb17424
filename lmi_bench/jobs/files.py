"""A user's files, read and checked: YAML documents and saved recommendations."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import plural

if TYPE_CHECKING:
    from lmi_bench.analysis.fleet.answer import Candidate, Recommendation

M = TypeVar("M", bound=BaseModel)
_NEEDED = ("recommended", "model", "input_tokens", "output_tokens")


def checked(kind: type[M], content: object, *, source: str, expected: str) -> M:
    """The content as this model; raises InputError that lists every mistake.

    expected  what such a file contains
    """
    try:
        return kind.model_validate(content)
    except ValidationError as exc:
        lines = [f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in exc.errors()]
        listed = "\n  ".join([plural(len(lines), "mistake"), *lines]) if lines[1:] else lines[0]
        raise InputError(f"{source}: {listed}\nexpected: {expected}") from exc


@dataclass(frozen=True, slots=True)
class SavedRecommendation:
    """The answer in a file of `recommend --json`.

    model             as the user named it
    profile_document  the profile of the plan; None if the file has none
    """

    answer: "Recommendation"
    best: "Candidate"
    model: str
    profile_document: Mapping[str, Any] | None


def read_recommendation(path: Path) -> Mapping[str, Any]:
    """The file's content, even if it recommends nothing; raises InputError for another file."""
    from lmi_bench.analysis.fleet.answer import Recommendation  # loads the planner

    try:
        content = orjson.loads(read_text(path))  # without NaN and boundless integers
    except ValueError as exc:
        raise InputError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(content, Mapping) or any(key not in content for key in _NEEDED):
        raise InputError(f"{path} is not a recommendation: write one with recommend --json FILE")
    try:
        Recommendation.from_json(content)
    except InputError as exc:
        raise InputError(f"{path}: {exc}") from exc
    return content


def load_recommendation(path: Path) -> SavedRecommendation:
    """The file's answer; raises InputError if it recommends no candidate."""
    from lmi_bench.analysis.fleet.answer import Recommendation  # loads the planner

    content = read_recommendation(path)
    answer = Recommendation.from_json(content)
    if answer.recommended is None:
        raise InputError(f"{path} recommends nothing: no candidate keeps its limits")
    if answer.recommended.instances < 1:
        raise InputError(f"{path}: the recommended fleet has no machine")
    document = content.get("profile_document")
    return SavedRecommendation(
        answer=answer,
        best=answer.recommended,
        model=str(content.get("model_as_named") or answer.question.model),
        profile_document=document if isinstance(document, Mapping) else None,
    )
