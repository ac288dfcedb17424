"""Recognises the tool that wrote a file by its fields, never by its name, and reads its levels."""

import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.units import MIB
from lmi_bench.interchange.imports import requests, tools
from lmi_bench.interchange.imports.level import Imported
from lmi_bench.interchange.imports.summary import Knows, Object, Reader, has

T = TypeVar("T")
_ARCHIVED = "profile_export_aiperf.json"
_MOST_ARCHIVED_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class _Requests:
    """A tool's file of requests, which does not state their load.

    ask      the error's text if no file beside it states the load
    beside   name of the tool's file that states the load, from this file's name
    """

    knows: Knows
    read: Callable[[Sequence[Object], Load], Imported]
    ask: str
    beside: Callable[[str], str] | None = None
    load_of: Callable[[Object], Load] | None = None


_REQUESTS = (
    _Requests(
        has("metadata.request_start_ns"),
        requests.read_aiperf,
        "profile_export.jsonl does not say under which load it was measured: give --concurrency N "
        "or --rate R",
        lambda name: name.replace(".jsonl", "_aiperf.json"),
        tools.AIPERF.load_of,
    ),
    _Requests(
        has("time_to_last_token", "num_tokens_output"),
        requests.read_llmeter,
        "responses.jsonl does not say how many clients there were: give --concurrency N",
        lambda _: "summary.json",
        tools.LLMETER.load_of,
    ),
    _Requests(
        has("error_code", "request_output_throughput_token_per_s"),
        requests.read_llmperf,
        "the requests do not say how many there were at once: give --concurrency N",
        lambda name: name.replace("individual_responses", "summary"),
        tools.LLMPERF.load_of,
    ),
    _Requests(
        has("start_time", "end_time", "info"),
        requests.read_inference_perf,
        "the requests do not say under which load they were sent: give --rate R or --concurrency N",
    ),
)
TOOLS = (
    "vllm bench serve", "SGLang bench_serving", "InferenceX", "AIPerf", "genai-perf", "guidellm",
    "genai-bench", "llmperf", "llmeter", "inference-perf", "evalscope perf", "awscurl",
    "llm-d benchmark report 0.2",
)  # fmt: skip


def read_results(path: Path, load: Load | None = None) -> Imported:
    """The levels of one file of another tool.

    load  overrides the file's own load; required if the file states none
    Raises InputError for an unknown kind of file, or a missing field.
    """
    objects = _archived(path) if tarfile.is_tarfile(path) else _objects(path)
    first = objects[0]
    for listed in _REQUESTS:
        if listed.knows(first):
            known = load or _checked(path, partial(_load_beside, path, listed))
            return _checked(path, partial(listed.read, objects, known))
    if tools.is_evalscope(first):
        joined = _checked(path, partial(tools.join_evalscope, objects, partial(_beside, path)))
        return _checked(path, partial(tools.read_evalscope, joined, load))
    for knows, read in tools.SUMMARIES:
        if knows(first):
            return _checked(path, partial(_read_each, read, objects, load))
    if tools.is_search_history(first):
        raise InputError(f"{path}: {tools.SEARCH_HISTORY_HELP}")
    if "AIRecommendationJobName" in first:
        raise InputError(f"{path}: {_checked(path, partial(_measured_by, first))}")
    raise InputError(
        f"{path}: no known tool writes such fields ({', '.join(sorted(first)[:6])}, ...); "
        f"known are {', '.join(TOOLS)}"
    )


def _measured_by(job: Object) -> str:
    """Where the measurements of a SageMaker recommendation job are: it only names them."""
    found = [
        f"{each['DeploymentConfiguration']['InstanceType']} by {name.rpartition('/')[2]}"
        for each in job.get("Recommendations", ())
        if (name := each.get("AIBenchmarkJobArn"))
    ]
    state, jobs = job["AIRecommendationJobStatus"], ", ".join(found) or "none yet"
    return (
        f"the description of a recommendation job ({state}); each layout was measured by a "
        f"benchmark job ({jobs}): import the output.tar.gz of that job"
    )


def _load_beside(path: Path, listed: _Requests) -> Load:
    """The load from the tool's summary beside a file of requests; InputError without one."""
    beside = None if listed.beside is None else _beside(path, listed.beside(path.name))
    if beside is None or listed.load_of is None:
        raise InputError(listed.ask)
    return listed.load_of(beside[0])


def _beside(path: Path, name: str) -> list[Object] | None:
    """The objects of another file in the same folder, if it exists."""
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


def _read_each(read: Reader, objects: Sequence[Object], load: Load | None) -> Imported:
    parts = [read(each, load) for each in objects]
    first = parts[0]
    return Imported(
        first.tool,
        tuple(level for part in parts for level in part.levels),
        first.facts,
        first.workload if all(part.workload == first.workload for part in parts) else {},
        first.notes,
    )


def _archived(path: Path) -> list[Object]:
    """AIPerf's summaries in an archive, such as SageMaker's benchmark jobs leave on S3."""
    with tarfile.open(path) as archive:
        members = [each for each in archive if each.isfile() and each.name.endswith(_ARCHIVED)]
        if not members:
            raise InputError(f"{path} holds no {_ARCHIVED}, which a benchmark job leaves in it")
        found = []
        for member in members:
            if member.size > _MOST_ARCHIVED_BYTES:
                raise InputError(f"{path}: {member.name} has {member.size:,} bytes: no summary")
            file = archive.extractfile(member)
            assert file is not None  # a plain file
            found += _checked(path, partial(_json_objects, file.read().decode(errors="replace")))
    return found


def _objects(path: Path) -> list[Object]:
    """The file's objects: a JSON object, one on each line, or a YAML document."""
    text = read_text(path)
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
