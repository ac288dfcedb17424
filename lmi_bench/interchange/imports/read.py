"""Which tool wrote a file is told by its fields, never by its name; then its reader maps it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports import (
    by_request_tools,
    evalscope,
    genai_bench,
    guidellm,
    nvidia,
    summaries,
    vllm_family,
)
from lmi_bench.interchange.imports.level import Imported

_Object = Mapping[str, Any]
_Reader = Callable[[_Object, Load | None], Imported]
_LinesReader = Callable[[Sequence[_Object], Load | None], Imported]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Requests:
    """A file of requests, which does not say under which load they were sent.

    beside   where the tool says it: its other file's name, from the first one's
    load_of  what stands there
    """

    knows: Callable[[_Object], bool]
    read: _LinesReader
    beside: Callable[[str], str]
    load_of: Callable[[_Object], Load] | None


# The first that knows the fields reads: SGLang's lines look like vLLM's but for a few.
_OBJECTS: tuple[tuple[Callable[[_Object], bool], _Reader], ...] = (
    (vllm_family.is_sglang, vllm_family.read_sglang),
    (vllm_family.is_vllm, vllm_family.read_vllm),
    (vllm_family.is_inferencex, vllm_family.read_inferencex),
    (nvidia.is_summary, nvidia.read_summary),
    (nvidia.is_sweep, nvidia.read_sweep),
    (nvidia.is_aggregate, nvidia.read_aggregate),
    (guidellm.is_guidellm, guidellm.read_guidellm),
    (genai_bench.is_genai_bench, genai_bench.read_genai_bench),
    (by_request_tools.is_llmperf, by_request_tools.read_llmperf),
    (by_request_tools.is_llmeter_summary, by_request_tools.read_llmeter_summary),
    (summaries.is_inference_perf, summaries.read_inference_perf),
    (summaries.is_awscurl, summaries.read_awscurl),
    (summaries.is_llm_d, summaries.read_llm_d),
)
_REQUESTS: tuple[_Requests, ...] = (
    _Requests(
        nvidia.is_request_line,
        nvidia.read_requests,
        lambda name: name.replace(".jsonl", "_aiperf.json"),
        nvidia.load_of,
    ),
    _Requests(
        by_request_tools.is_llmeter_line,
        by_request_tools.read_llmeter,
        lambda _: "summary.json",
        by_request_tools.llmeter_load,
    ),
    _Requests(
        by_request_tools.is_llmperf_request,
        by_request_tools.read_llmperf_requests,
        lambda name: name.replace("individual_responses", "summary"),
        by_request_tools.llmperf_load,
    ),
    _Requests(
        by_request_tools.is_inference_perf_request,
        by_request_tools.read_inference_perf_requests,
        lambda name: name,
        None,
    ),
)
TOOLS = (
    "vllm bench serve", "SGLang bench_serving", "InferenceX", "AIPerf", "genai-perf", "guidellm",
    "genai-bench", "llmperf", "llmeter", "inference-perf", "evalscope perf", "awscurl",
    "llm-d benchmark report 0.2",
)  # fmt: skip


def read_results(path: Path, load: Load | None = None) -> Imported:
    """The levels of one file of another tool.

    load  where the file does not say under which load it was measured, or says it wrong
    Raises InputError where no reader knows the file, or a field it needs is missing.
    """
    objects = _objects(path)
    first = objects[0]
    for requests in _REQUESTS:
        if requests.knows(first):
            known = load or _checked(path, partial(_load_beside, path, requests))
            return _checked(path, partial(requests.read, objects, known))
    if evalscope.is_summary(first) or evalscope.is_percentiles(first):
        joined = _checked(path, partial(evalscope.join, objects, partial(_beside, path)))
        return _checked(path, partial(evalscope.read_evalscope, joined, load))
    for knows, read in _OBJECTS:
        if knows(first):
            return _checked(path, partial(_read_each, read, objects, load))
    if nvidia.is_search_history(first):
        raise InputError(f"{path}: {nvidia.SEARCH_HISTORY_HELP}")
    raise InputError(
        f"{path}: no known tool writes such fields ({', '.join(sorted(first)[:6])}, ...); "
        f"known are {', '.join(TOOLS)}"
    )


def _load_beside(path: Path, requests: _Requests) -> Load | None:
    """The load by the tool's own summary beside a file of requests; None where there is none."""
    if requests.load_of is None:
        return None
    found = _beside(path, requests.beside(path.name))
    return None if found is None else requests.load_of(found[0])


def _beside(path: Path, name: str) -> list[_Object] | None:
    """The objects of another file in the same folder, if it is there."""
    other = path.with_name(name)
    return _objects(other) if name != path.name and other.is_file() else None


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except InputError as exc:
        raise InputError(f"{path}: {exc}") from exc
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InputError(
            f"{path}: a field is missing or has another form than documented "
            f"({type(exc).__name__}: {exc})"
        ) from exc


def _read_each(read: _Reader, objects: Sequence[_Object], load: Load | None) -> Imported:
    parts = [read(each, load) for each in objects]
    first = parts[0]
    return Imported(
        first.tool,
        tuple(level for part in parts for level in part.levels),
        first.facts,
        first.workload if all(part.workload == first.workload for part in parts) else {},
        first.notes,
    )


def _objects(path: Path) -> list[_Object]:
    """The file's JSON objects: one, one a line, or a YAML document."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read {path}: {file_reason(exc)}") from exc
    try:
        is_yaml = path.suffix in (".yaml", ".yml")
        found = [yaml.safe_load(text)] if is_yaml else _json_objects(text)
    except (ValueError, yaml.YAMLError) as exc:
        raise InputError(f"{path} is neither JSON nor JSON lines: {exc}") from exc
    if not found or not all(isinstance(each, Mapping) for each in found):
        raise InputError(f"{path} holds no JSON object")
    return found


def _json_objects(text: str) -> list[Any]:
    """Python's own parser: it takes Infinity, which SGLang writes and JSON forbids."""
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]
