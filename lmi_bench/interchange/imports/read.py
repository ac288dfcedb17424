"""Imports other tools' results: their levels become a run folder.

The tool that wrote a file is recognised by its fields, never by its name. Every other command
reads the run folder like our own.
"""

import hashlib
import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.durable import json_values, parsed_yaml, read_text
from lmi_bench.core.errors import UNREADABLE, InputError, file_reason
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest, RunScenario, TargetFacts
from lmi_bench.core.run_store import RunStore
from lmi_bench.core.units import MIB
from lmi_bench.interchange.imports import tools
from lmi_bench.interchange.imports.level import Imported, stated_load
from lmi_bench.interchange.imports.summary import Object, has, tables

_ARCHIVED = "profile_export_aiperf.json"
_MOST_ARCHIVED_BYTES = 64 * MIB
_MOST_NESTED = 64  # what is kept of a file goes into a run, whose lines have their own limit
TOOLS = (
    *("vllm bench serve", "SGLang bench_serving", "InferenceX", "AIPerf", "genai-perf", "guidellm", "genai-bench"),
    *("llmperf", "llmeter", "inference-perf", "evalscope perf", "awscurl", "llm-d benchmark report 0.2"),
)


def read_results(path: Path, load: Load | None = None) -> Imported:
    """The levels of one file of another tool.

    load  overrides the file's own load; required if the file states none
    Raises InputError for an unknown kind of file, or a missing field.
    """
    objects = _objects(path)
    first = objects[0]
    with _explained(path):
        for tool, table in tables().items():  # files of requests do not state their load
            listed = table.get("requests")
            if listed is not None and has(first, listed["known_by"]):
                if load is None:
                    pattern, other = listed["beside"]
                    beside = _beside(path, re.sub(pattern, other, path.name))
                    load = tools.summary_of(tool).load_of(beside[0]) if beside else stated_load()
                return tools.read_requests(tool, objects, load)
        for tool, table in tables().items():
            if any(has(first, paths) for paths in table["known_by"]):
                if tool == "evalscope":
                    objects = [tools.join_evalscope(objects, partial(_beside, path))]
                return joined([tools.read_summary(tool, each, load) for each in objects])
        for row in read_rows("files_without_latencies.csv", "interchange"):
            if has(first, row["known_by"].split()):
                raise InputError(row["advice"])
        if "AIRecommendationJobName" in first:
            measured = [
                f"{each['DeploymentConfiguration']['InstanceType']} by {name.rpartition('/')[2]}"
                for each in first.get("Recommendations", ())
                if (name := each.get("AIBenchmarkJobArn"))
            ]
            state, jobs = first["AIRecommendationJobStatus"], ", ".join(measured) or "none yet"
            raise InputError(
                f"the description of a recommendation job ({state}); each layout was measured by a "
                f"benchmark job ({jobs}): import the output.tar.gz of that job"
            )
        raise InputError(
            f"no known tool writes such fields ({', '.join(sorted(first)[:6])}, ...); known are {', '.join(TOOLS)}"
        )


def _beside(path: Path, name: str) -> list[Object] | None:
    """The objects of another file in the same folder, if it exists."""
    other = path.with_name(name)
    return _objects(other) if name != path.name and other.is_file() else None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors name the file, and say of a missing or wrong field which it is."""
    try:
        yield
    except InputError as exc:
        raise InputError(f"{path}: {exc}") from exc
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as exc:
        raise InputError(
            f"{path}: a field is missing or has another form than documented ({type(exc).__name__}: {exc})"
        ) from exc


def joined(parts: Sequence[Imported]) -> Imported:
    """All levels, with what the first part says of the rest; raises InputError if they differ."""
    first = parts[0]
    for name in first.facts:
        values = {str(value) for part in parts if (value := part.facts.get(name)) not in (None, [], "")}
        if len(values) > 1:
            raise InputError(f"{name} is {' and '.join(sorted(values))}: import each by itself")
    levels = tuple(level for part in parts for level in part.levels)
    is_same = all(part.workload == first.workload for part in parts)
    return replace(first, levels=levels, workload=first.workload if is_same else {})


def _archived(path: Path, archive: tarfile.TarFile) -> list[Object]:
    """AIPerf's summaries in an archive, such as SageMaker's benchmark jobs leave on S3."""
    with archive:
        members = [each for each in archive if each.isfile() and each.name.endswith(_ARCHIVED)]
        if not members:
            raise InputError(f"{path} holds no {_ARCHIVED}, which a benchmark job leaves in it")
        found = []
        for member in members:
            if member.size > _MOST_ARCHIVED_BYTES:
                raise InputError(f"{path}: {member.name} has {member.size:,} bytes: no summary")
            file = archive.extractfile(member)
            assert file is not None  # a plain file
            with _explained(path):
                found += json_values(file.read().decode(errors="replace"), member.name)
    return found


def _objects(path: Path) -> list[Object]:
    """The file's objects: a JSON object, one on each line, a YAML document, or an archive's."""
    try:
        if path.is_file() and tarfile.is_tarfile(path):  # it would look for an end of /dev/zero
            return _flat_enough(_archived(path, tarfile.open(path)), path)
    except (*UNREADABLE, tarfile.TarError) as exc:
        raise InputError(f"cannot read {path}: {file_reason(exc)}") from exc
    text = read_text(path)
    is_yaml = path.suffix in (".yaml", ".yml")
    found = [parsed_yaml(text, path)] if is_yaml else json_values(text, path)
    if not found or not all(isinstance(each, Mapping) for each in found):
        raise InputError(f"{path} holds no JSON object")
    return _flat_enough(found, path)


def _flat_enough(objects: list[Object], path: Path) -> list[Object]:
    """The objects; raises InputError if their values are nested too deep, as in a YAML circle."""
    layer: dict[int, Any] = dict(enumerate(objects))
    for _ in range(_MOST_NESTED):
        inner = (v.values() if isinstance(v, Mapping) else v for v in layer.values())
        layer = {id(v): v for each in inner for v in each if isinstance(v, Mapping | list)}
        if not layer:
            return objects
    raise InputError(f"{path}: its values are nested more than {_MOST_NESTED} deep")


def write_imported(parts: Sequence[Imported], folder: Path, *, command: Sequence[str]) -> int:
    """Write the levels of several files of one tool as one run; returns how many.

    Raises InputError where the files are of several tools, or the folder exists.
    """
    tools = sorted({part.tool for part in parts})
    if len(tools) > 1:
        raise InputError(f"files of {' and '.join(tools)} are not one run: import those of each tool separately")
    whole = joined(parts)
    facts = {key: value for key, value in whole.facts.items() if value not in (None, [], "")}
    scenario: dict[str, Any] = {"name": "", "model": facts.get("model", ""), "target": tools[0]}
    scenario |= {"workload": whole.workload} if whole.workload else {}
    digest = hashlib.sha256(json.dumps(scenario, sort_keys=True).encode()).hexdigest()
    manifest = Manifest(
        scenario=RunScenario.from_json(scenario, "the files"),
        scenario_hash=digest,
        target=TargetFacts.from_json({"kind": "imported", "tool": tools[0], **facts}, "the files"),
        commands=[list(command)],
        imported_from=tools[0],
        notes=sorted({note for part in parts for note in part.notes}),
    )
    if not whole.levels:
        raise InputError("the files hold no level")
    with RunStore.create(folder, manifest) as store:
        try:
            for index, level in enumerate(whole.levels):
                store.append_level(level.records, replace(level.level, index=index))
        except BaseException:  # half of it would look like a run, and nothing resumes it
            shutil.rmtree(folder)
            raise
    return len(whole.levels)
