"""The scenario of a sweep, from a YAML file.

Every field has a default, all mistakes are reported at once, and the error for an unknown field
names the nearest known one. The canonical form (all fields, defaults filled in) is hashed, so that
a run can only be resumed with the scenario that began it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from lmi_bench.core.durable import parsed_yaml, read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario_fields import Positive, Text, TopFields
from lmi_bench.core.scenario_sections import (
    ClientSection,
    EngineSection,
    LengthShare,
    LoadSection,
    SageMakerSection,
    Section,
    WorkloadSection,
    raise_value_error,
)
from lmi_bench.core.slo import parse_slo

# defined in the sections
__all__ = ["ClientSection", "EngineSection", "SageMakerSection", "WorkloadSection"]

AUTO = "auto"
DEFAULT_MODEL = "demo-15m"
ENGINE_TARGET, SIMULATED_PREFIX, SAGEMAKER_PREFIX = "engine", "sim:", "sagemaker:"
SAGEMAKER_UNARY_TIMEOUT_S, SAGEMAKER_STREAMING_TIMEOUT_S = 60.0, 480.0
"""SageMaker's time limits for an unstreamed and for a streamed response."""
FILES = ("dataset", "trace", "conversations", "agent_trace")
"""Fields of the workload that name a file, or a folder of JSON files."""
_SOURCES = ("agents", "agent_trace", "trace", "dataset", "conversations")
_OWN_LENGTHS = {"input_tokens": _SOURCES, "output_tokens": _SOURCES[:3]}
"""Sources of requests beside which a length has no effect."""
_ADDED = {
    "load": ("repeat_unsteady", "stop_when"),
    "workload": ("agents", "agent_trace", "idle_cap_s", "begins_within"),
    "client": ("adapters", "session_header", "reset_prefix_cache", "cacert", "insecure", "priority"),
    "engine": ("host_cache_gib", "host_cache_gb_per_s"),
}
"""Later fields of the sections: unset, they are no part of a hash, so that older runs go on."""
_SHOWN_CHARACTERS = 60
"""Characters that an error message shows of a document that is no scenario."""
_DERIVED = ("model", "timeout_s")
"""Fields whose default depends on the others."""


def is_endpoint(target: str) -> bool:
    """Whether the target is a server somewhere: a URL or `sagemaker:NAME`."""
    return "://" in target or target.startswith(SAGEMAKER_PREFIX)


def _default_model(fields: dict[str, Any]) -> str:
    return AUTO if is_endpoint(fields.get("target", "")) else DEFAULT_MODEL


def _default_timeout_s(fields: dict[str, Any]) -> float | None:
    streams = fields.get("stream", True)
    limit_s = SAGEMAKER_STREAMING_TIMEOUT_S if streams else SAGEMAKER_UNARY_TIMEOUT_S
    return limit_s if str(fields.get("target", "")).startswith(SAGEMAKER_PREFIX) else None


class Scenario(Section, TopFields):
    """A whole sweep.

    unrecorded  what the log that the scenario describes does not hold: its rate, its lengths (then
                they are assumed); answers say so
    """

    model: Text = Field(default_factory=_default_model)
    sagemaker: SageMakerSection = SageMakerSection()
    workload: WorkloadSection = WorkloadSection()
    load: LoadSection = LoadSection()
    client: ClientSection = ClientSection()
    engine: EngineSection = EngineSection()
    timeout_s: Positive | None = Field(default_factory=_default_timeout_s)
    unrecorded: tuple[Literal["rate", "lengths"], ...] = ()

    @field_validator("timeout_s", mode="before")
    @classmethod
    def _seconds_or_none(cls, value: object) -> object:
        return None if value == "none" else value

    @field_validator("slo", mode="before")
    @classmethod
    def _one_slo_without_brackets(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("slo")
    @classmethod
    def _slo_is_understood(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            raise_value_error(parse_slo, text)
        return value

    @model_validator(mode="after")
    def _a_search_has_a_limit(self) -> Scenario:
        if self.load.search is not None and not self.slo:
            raise ValueError(f"a search over {self.load.search} needs an SLO (slo, --slo), such as ttft_p90<=1s")
        return self

    @model_validator(mode="after")
    def _sessions_have_their_own_load(self) -> Scenario:
        if self.workload.begins_within and self.load.rate_per_s:
            raise ValueError("begins_within is for concurrency: a rate has no lanes")
        if self.workload.has_sessions:
            if self.load.search is not None:
                raise ValueError("a search over conversations is not supported; list the levels")
        else:
            for name in ("sessions_per_level", "max_sessions"):
                if getattr(self.load, name) is not None:
                    raise ValueError(f"{name} needs conversations; give turns or conversations")
            if self.client.session_header is not None:
                raise ValueError("session_header needs conversations; give turns or conversations")
            if self.load.max_in_flight is not None and self.load.rate_per_s is None:
                raise ValueError("max_in_flight caps a rate or conversations; give one of them")
        return self

    @model_validator(mode="after")
    def _a_trace_has_its_own_times(self) -> Scenario:
        if self.workload.trace is not None and self.load.search == "rate":
            raise ValueError("a search over rates makes its own arrivals; leave the trace out")
        if self.workload.trace is None and self.load.speed != (1.0,):
            raise ValueError("speed applies to a trace; give a trace, or a rate instead")
        return self

    def canonical(self) -> dict[str, Any]:
        """All fields with their defaults filled in, as plain JSON values; `unrecorded` if set."""
        return self.model_dump(mode="json", exclude=None if self.unrecorded else {"unrecorded"})

    def hash(self) -> str:
        """SHA-256 of everything that decides the measurement.

        The name and what was not recorded do not count, and SLOs only if they choose the levels; a
        file counts with its content. Raises InputError if it cannot be read.
        """
        content = self.canonical()
        for free in ("name", "unrecorded", *(() if self.load.is_adaptive else ("slo",))):
            content.pop(free, None)
        workload, usual = content["workload"], Scenario().canonical()
        for section, names in _ADDED.items():
            for name in names:
                value = content[section][name]
                if not value and value != "" and value == usual[section][name]:
                    del content[section][name]
        for name in FILES:
            if workload.get(name) is not None:
                workload[name] = _digest(Path(workload[name]))
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_overrides(self, overrides: Mapping[str, Any]) -> Scenario:
        """A scenario with some fields replaced, checked again as a whole.

        Keys are dotted (`load.concurrency`); a value of None leaves the field alone. A rate
        replaces a concurrency and the other way round; a length replaces a mix, a distribution
        and a trace. Raises InputError for one that has no effect.
        """
        content = self.model_dump()
        for name in _DERIVED:
            if name not in self.model_fields_set:
                del content[name]
        for dotted, value in overrides.items():
            if value is None:
                continue
            *sections, last = dotted.split(".")
            place = content
            for section in sections:
                place = place.setdefault(section, {})
            if dotted == "load.concurrency":
                place["rate_per_s"] = None
            elif dotted == "load.rate_per_s":
                place["concurrency"] = None
            elif dotted in ("workload.input_tokens", "workload.output_tokens"):
                place |= {"mix": (), "trace": None}
                place[last.replace("tokens", "lengths")] = None
            place[last] = value
        stated = {name: overrides.get(f"workload.{name}") for name in _OWN_LENGTHS}
        _check_lengths(stated, content["workload"])
        return parse_scenario(content)


def parse_scenario(content: object, *, source: str = "scenario") -> Scenario:
    """A scenario from plain values; raises InputError that lists every mistake."""
    if content is None:
        content = {}
    if not isinstance(content, dict):
        got = repr(content)
        shown = got if len(got) <= _SHOWN_CHARACTERS else f"{got[:_SHOWN_CHARACTERS]} ..."
        raise InputError(f"{source}: expected fields such as `model: demo-15m`, got {shown}")
    try:
        return Scenario.model_validate(content)
    except ValidationError as exc:
        lines = [_describe(dict(error)) for error in exc.errors() if not _follows(error)]
        listed = "\n  ".join([f"{len(lines)} mistakes", *lines]) if lines[1:] else lines[0]
        raise InputError(f"{source}: {listed}") from exc


def _follows(error: Mapping[str, Any]) -> bool:
    """Whether a mistake only follows from another one, which is reported.

    A list of levels that is wrong is also not `auto`; a default that is computed from other fields
    is missing if these are wrong.
    """
    if error["type"] == "default_factory_not_called":
        return True
    return error["type"] == "literal_error" and "literal['auto']" in error["loc"]


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; raises InputError for one that cannot be read."""
    return parsed_yaml(read_text(path), path)


def load_scenario(path: Path) -> Scenario:
    """Read and check a scenario file; raises InputError when it cannot be used."""
    scenario = parse_scenario(read_yaml(path), source=str(path))
    stated = scenario.workload.model_dump(exclude_defaults=True)
    _check_lengths(stated, stated, f"{path}: ")
    relative = {
        f"{section}.{name}": str(path.parent / given)
        for section, name in (*(("workload", name) for name in FILES), ("client", "cacert"))
        if (given := getattr(getattr(scenario, section), name)) and not Path(given).is_absolute()
    }
    return scenario.with_overrides(relative) if relative else scenario


def _check_lengths(stated: Mapping[str, Any], workload: Mapping[str, Any], place: str = "") -> None:
    for name, sources in _OWN_LENGTHS.items():
        for source in sources:
            if stated.get(name) is not None and workload.get(source) is not None:
                hint = "state answer=200,task=1500 there" if source == "agents" else "leave it out"
                raise InputError(f"{place}{name} would have no effect: lengths are those of {source}; {hint}")


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            found.update(file.read_bytes())
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}") from exc
    return found.hexdigest()


def _describe(error: Mapping[str, Any]) -> str:
    """One mistake in one line: where, what was given, what to write."""
    where = ".".join(str(part) for part in error["loc"] if not str(part).startswith("tuple["))
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown field{_nearest(error['loc'])}"
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "must", 1)
    given = error.get("input")
    if isinstance(given, str | int | float):
        message += f", got {given!r}"
    return f"{where}: {message}" if where else message


def _nearest(location: Sequence[str | int]) -> str:
    """The known field that was probably meant, as the end of a sentence."""
    parts = [part for part in location[:-1] if isinstance(part, str)]
    section: type[BaseModel] = Scenario if not parts else _SECTIONS.get(parts[-1], LengthShare)
    here = {name: name for name in section.model_fields}
    everywhere = {name: name for name in Scenario.model_fields}
    for name, inner in _SECTIONS.items():
        everywhere |= {field: f"{name}.{field}" for field in inner.model_fields}
    for known in (here, everywhere):
        if close := difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6):
            return f"; did you mean {known[close[0]]}?"
    return f"; known here: {', '.join(sorted(here))}"


_SECTIONS = {
    name: type(field.default) for name, field in Scenario.model_fields.items() if isinstance(field.default, Section)
}
