"""The run folder: the files of a sweep, written so that a killed sweep can resume.

    manifest.json   schema version, scenario and its hash, target, host, versions, commands
    requests.jsonl  one line a request; seconds since its level's start, monotonic
    levels.jsonl    one line a finished level, written after its requests are on disk
    knees.json      written when the sweep is over

Both .jsonl files only ever grow. A request counts only if its (level, attempt) has a line in
levels.jsonl: a sweep killed at any moment loses at most the level in flight, and resumes there.
No secret is ever written (see `redaction`).
"""

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from lmi_bench.core import durable
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.exchange import packed
from lmi_bench.core.findings import Knee, SloAnswer
from lmi_bench.core.host import host_facts, installed_versions, without_collection
from lmi_bench.core.level import Level
from lmi_bench.core.manifest import Manifest, read_manifest
from lmi_bench.core.records import RequestRecord, StoredRecords, check_line, request_line
from lmi_bench.core.redaction import redact
from lmi_bench.core.scenario import FILES, parse_scenario
from lmi_bench.core.server_metrics import CloudWatch, ServerMetrics
from lmi_bench.core.units import plural

MANIFEST, REQUESTS, LEVELS, KNEES = "manifest.json", "requests.jsonl", "levels.jsonl", "knees.json"
SLO_ANSWER, CLOUDWATCH = "slo.json", "cloudwatch.json"
_FILES = (MANIFEST, REQUESTS, LEVELS, KNEES, SLO_ANSWER, CLOUDWATCH)


@dataclass(frozen=True, slots=True)
class Run:
    """A run read back: `records[i]` are the requests of `levels[i]`, in request order."""

    path: Path
    manifest: Manifest
    levels: list[Level]
    records: list[Sequence[RequestRecord]]
    knees: list[Knee] | None
    slo_answer: SloAnswer | None = None


class RunStore(AbstractContextManager["RunStore"]):
    """The one writer of a run folder; use it as a context manager or `close` it."""

    def __init__(self, path: Path, manifest: Manifest, secrets: Sequence[str]) -> None:
        self.path = path
        self.manifest = manifest
        self.levels: list[Level] = []
        self._secrets = tuple(secrets)
        self._attempts: dict[int, int] = {}
        self._lock_fd: int | None = durable.lock_folder(path)

    @classmethod
    def create(cls, path: Path, manifest: Manifest, *, secrets: Sequence[str] = ()) -> "RunStore":
        """Begin a run in a new folder, now and on this machine.

        secrets  values that must never be written
        Raises InputError when the folder exists.
        """
        try:
            path.mkdir(parents=True)
        except FileExistsError as exc:
            if not is_unstarted(path):
                raise InputError(
                    f"{path} exists: name another folder with --out, or continue it with --resume"
                ) from exc
        except OSError as exc:
            raise InputError(f"cannot make the run folder {path}: {exc.strerror}") from exc
        with _writing(path, "the run", "make room and start again"), ExitStack() as on_failure:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            manifest = replace(manifest, created_at=now, host=host_facts(), versions=installed_versions())
            store = cls(path, Manifest.from_json(redact(manifest.to_json(), secrets)), secrets)
            on_failure.callback(store.close)
            for name in (REQUESTS, LEVELS):
                durable.append_and_sync(path / name, b"")
            durable.write_whole(path / MANIFEST, store.manifest.to_json())
            on_failure.pop_all()
        return store

    @classmethod
    def resume(cls, path: Path, asked: Manifest, *, secrets: Sequence[str] = ()) -> "RunStore":
        """Continue a run where it stopped: finished levels are kept byte for byte.

        asked  what would begin now: its scenario must be the run's, its commands and salt are kept
        Raises InputError when there is no run, another scenario began it, another sweep is
        writing it, or requests of its levels are lost.
        """
        if not (path / MANIFEST).exists():
            raise InputError(f"{path} holds no run to resume: leave --resume out to begin one")
        manifest = load_manifest(path)
        then = manifest.scenario.to_json()
        with suppress(InputError):  # an older version's lacks the fields that were added since
            then = parse_scenario(then).canonical()
        then |= {"profile": manifest.target.profile}
        now = redact(asked.scenario.to_json(), secrets) | {"profile": asked.target.profile}
        is_same = then | {"name": now.get("name")} == now and manifest.imported_from is None
        # a file that it names may have another content by now, which only the hash tells
        is_same &= not any(then.get("workload", {}).get(name) for name in FILES)
        if manifest.scenario_hash != asked.scenario_hash and not is_same:
            raise InputError(
                f"{path} was begun with another scenario "
                f"(hash {manifest.scenario_hash[:12]}, now {asked.scenario_hash[:12]})"
                + _first_difference(then, now)
                + ": name another folder with --out, or resume with the same scenario"
            )
        with _writing(path, "the run", "make room and try again"), ExitStack() as on_failure:
            store = cls(path, manifest, secrets)
            on_failure.callback(store.close)
            for name in (REQUESTS, LEVELS):
                durable.drop_torn_tail(path / name)
            store.levels = _read_levels(path, [])
            lines = _read_lines(path / REQUESTS, [])
            counts = Counter((line["level"], line["attempt"]) for line in lines)
            _complete((path, manifest), store.levels, counts, None)
            for level, attempt in (*counts, *((each.index, each.attempt) for each in store.levels)):
                store._attempts[level] = max(attempt, store._attempts.get(level, 0))
            if asked.commands:
                commands = [*manifest.commands, *redact(asked.commands, secrets)]
                store.manifest = replace(manifest, commands=commands, salt=asked.salt)
                durable.write_whole(path / MANIFEST, store.manifest.to_json())
            on_failure.pop_all()
        return store

    def next_attempt(self, level: int) -> int:
        """The number of the next attempt at a level: 1, or one above those in the files."""
        return self._attempts.get(level, 0) + 1

    def append_level(self, records: Sequence[RequestRecord], finished: Level) -> None:
        """Save a finished level: its requests first, then the line that makes them count.

        Raises LmiBenchError when the disk takes no more; the level is then not part of the run.
        """
        level, attempt = finished.index, finished.attempt
        requests = b"".join(
            orjson.dumps(request_line(level, attempt, record, self._secrets), option=_ONE_LINE) for record in records
        )
        line = redact(finished.to_json(), self._secrets)
        go_on = "make room, import again" if self.manifest.imported_from else f"the levels before it are safe: {_GO_ON}"
        with _writing(self.path, f"level {level + 1}", go_on):
            durable.append_and_sync(self.path / REQUESTS, requests)
            durable.append_and_sync(self.path / LEVELS, orjson.dumps(line, option=_ONE_LINE))
        self.levels.append(finished if line == finished.to_json() else Level.from_json(line))
        self._attempts[level] = max(attempt, self._attempts.get(level, 0))

    def write_knees(self, knees: Sequence[Knee]) -> None:
        """Save the knees of the finished sweep."""
        self._write(KNEES, [knee.to_json() for knee in knees])

    def write_slo_answer(self, answer: SloAnswer) -> None:
        """Save the highest load that a search found."""
        self._write(SLO_ANSWER, answer.to_json())

    def write_cloudwatch(self, levels: Sequence[CloudWatch]) -> None:
        """Save CloudWatch's metrics of levels; earlier levels keep theirs."""
        known = _cloudwatch(self.path) | {(each.level, each.attempt): each for each in levels}
        self._write(CLOUDWATCH, [each.to_json() for each in known.values()])

    def close(self) -> None:
        """Unlock the folder for other sweeps."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, content: Any) -> None:
        with _writing(self.path, name, f"the levels are safe: {_GO_ON}"):
            durable.write_whole(self.path / name, redact(content, self._secrets))


_GO_ON = "make room and continue with --resume"


@contextmanager
def _writing(path: Path, what: str, help_text: str) -> Iterator[None]:
    """Turn a write error into one line: which part of the run failed, and what to do."""
    try:
        yield
    except OSError as exc:
        raise LmiBenchError(f"cannot write {what} to {path}: {exc.strerror}; {help_text}") from exc


def load_manifest(path: Path) -> Manifest:
    """The manifest of a run folder; raises InputError for no run, a newer one, or one of links."""
    if not path.exists():
        raise InputError(f"there is no run folder {path}")
    if not (path / MANIFEST).exists():
        raise InputError(f"{path} is not a run folder: it has no {MANIFEST}")
    durable.check_plain(*(path / name for name in _FILES))
    return read_manifest(path / MANIFEST)


def load_run(path: Path, *, to_resume: bool = False) -> Run:
    """Read a run folder, finished or not; only requests of finished levels count.

    A line that is cut off and a level that lacks requests are left out, with a warning, and
    without one where a sweep is writing the run or will go on with it (`to_resume`).

    Raises InputError when it is no run, a newer lmi-bench wrote it, or nothing is whole.
    """
    manifest = load_manifest(path)
    tears: list[str] = []
    levels = _read_levels(path, tears)
    seen = _cloudwatch(path)
    for place, level in enumerate(levels):
        cloudwatch = seen.get((level.index, level.attempt))
        if cloudwatch is not None:
            server = replace(level.server or ServerMetrics(), cloudwatch=cloudwatch)
            levels[place] = replace(level, server=server)
    lines: dict[tuple[int, int], list[dict[str, Any]]] = {(level.index, level.attempt): [] for level in levels}
    with without_collection():  # it would look through all lines again and again, and free none
        for line in _read_lines(path / REQUESTS, tears):
            kept = lines.get((line["level"], line["attempt"]))
            if kept is not None:
                check_line(line, path / REQUESTS)
                line["token_times_s"], line["token_counts"] = packed(line["token_times_s"], line["token_counts"])
                kept.append(line)
    counts = {key: len(kept) for key, kept in lines.items() if kept}
    levels = _complete((path, manifest), levels, counts, tears)
    knees, answer = _found(path / KNEES, list), _found(path / SLO_ANSWER, dict)
    if tears:
        knees = answer = None  # they follow from all levels
    for text in () if to_resume or durable.is_locked(path) else tears:
        warnings.warn(text + _REPAIR, stacklevel=1)  # of this line: shown once
    return Run(
        path=path,
        manifest=manifest,
        levels=levels,
        records=[
            StoredRecords(sorted(lines[level.index, level.attempt], key=itemgetter("request_id"))) for level in levels
        ],
        knees=None if knees is None else [Knee.from_json(each, KNEES) for each in knees],
        slo_answer=None if answer is None else SloAnswer.from_json(answer, SLO_ANSWER),
    )


_REPAIR = "; `lmi-bench report RUN_DIR --repair` keeps what is whole, and the old file beside it"


def repair_run(path: Path) -> list[str]:
    """Write a torn run whole: without lines that cannot be read, and levels that lack requests.

    A file that changes stays beside it as NAME.torn. Returns what was done, one line a file; raises
    InputError where nothing can be: the manifest is torn, or a sweep is writing the run.
    """
    manifest = load_manifest(path)
    lock = durable.lock_folder(path)
    try:
        absent = [name for name in (REQUESTS, LEVELS) if not (path / name).exists()]
        requests, levels = (_readable_lines(path / name) for name in (REQUESTS, LEVELS))
        counts = Counter((line["level"], line["attempt"]) for _, line in requests)
        stored = [(text, Level.from_json(line, LEVELS)) for text, line in levels]
        found = [text for text, level in stored if _has_all(level, counts, manifest)]
        whole = {REQUESTS: b"".join(text for text, _ in requests), LEVELS: b"".join(found)}
        changed = [n for n in whole if n in absent or (path / n).stat().st_size != len(whole[n])]
        for name, kind in ((KNEES, list), (SLO_ANSWER, dict), (CLOUDWATCH, list)):
            with suppress(InputError):
                is_stale = LEVELS in changed and name != CLOUDWATCH  # they follow from the levels
                if _found(path / name, kind) is None or not is_stale:
                    continue
            changed.append(name)
        for torn in (path / f"{name}.torn" for name in changed):  # all, before a file changes
            if torn.exists() or torn.is_symlink():
                raise InputError(f"{torn} is there already: move it, and repair again")
        for name in changed:
            # a kill leaves the file itself or the new one
            shutil.copyfile(path / name, path / f"{name}.torn")
            if name in whole:
                durable.replace_file(path / name, whole[name])
            else:
                (path / name).unlink()
    finally:
        os.close(lock)
    kept = {REQUESTS: len(requests), LEVELS: len(found)}
    return [
        f"{path / name}: {plural(kept[name], 'line') if name in kept else 'nothing'} kept; "
        f"the file as it was is {name}.torn"
        for name in changed
    ]


def _has_all(level: Level, counts: Mapping[Any, int], manifest: Manifest) -> bool:
    """Whether a level's requests are there; an imported run may have none of any level."""
    has_none = not counts and manifest.imported_from is not None
    return has_none or counts.get((level.index, level.attempt), 0) >= level.sent


def _complete(
    run: tuple[Path, Manifest], levels: list[Level], counts: dict[Any, int], tears: list[str] | None
) -> list[Level]:
    """The levels whose requests are all there; `tears` names the others, or InputError does."""
    whole = [level for level in levels if _has_all(level, counts, run[1])]
    if lost := [
        f"{counts.get((each.index, each.attempt), 0):,} of the {each.sent:,} requests of level {each.index + 1}"
        for each in levels
        if each not in whole
    ]:
        text = f"{run[0] / REQUESTS} has {', '.join(lost)}: left out"
        if tears is None or not whole:
            raise InputError(text + _REPAIR)
        tears.append(text)
    return whole


def _readable_lines(file: Path) -> list[tuple[bytes, dict[str, Any]]]:
    found = []
    durable.append_and_sync(file, b"")
    with file.open("rb") as lines:
        while text := lines.readline(_MOST_LINE_BYTES):
            with suppress(InputError):
                line = _line_of(text, str(file))
                if file.name == REQUESTS:
                    check_line(line, file)
                found.append((text.removesuffix(b"\n") + b"\n", line))
    return found


def _found(file: Path, kind: type) -> Any:
    """The content of a file; None without one. Raises InputError where it is torn or another's."""
    if not file.exists():
        return None
    try:
        content = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as exc:
        raise InputError(f"{file} is not JSON: {exc}{_REPAIR}") from exc
    if not isinstance(content, kind):
        raise InputError(f"{file} is not what lmi-bench writes: remove it, and the run is read")
    return content


def _cloudwatch(path: Path) -> dict[tuple[int | None, int | None], CloudWatch]:
    lines = _found(path / CLOUDWATCH, list) or ()
    found = [CloudWatch.from_json(line, str(path / CLOUDWATCH)) for line in lines]
    return {(each.level, each.attempt): each for each in found}


_MOST_LINE_BYTES = 2**26  # of a line; a longer one is no request's
_ONE_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def is_unstarted(path: Path) -> bool:
    """Whether a run was killed here before it wrote its manifest, so that nothing can be lost."""
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    unfinished = {each.name for each in path.glob(f"{MANIFEST}.*{durable.UNFINISHED}")}
    return durable.LOCK in names and names <= unfinished | {durable.LOCK, REQUESTS, LEVELS}


def _read_levels(path: Path, tears: list[str]) -> list[Level]:
    file = path / LEVELS
    return [
        Level.from_json(line, f"{file}: line {number}") for number, line in enumerate(_read_lines(file, tears), start=1)
    ]


def _read_lines(path: Path, tears: list[str]) -> Iterator[dict[str, Any]]:
    """Lines of a .jsonl file, without a last line that was cut off, which `tears` then names."""
    if not path.exists():
        raise InputError(f"{path} is missing{_REPAIR}")
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), 1):
            if not line.endswith(b"\n"):
                tears.append(f"{path}: line {number} is cut off, so it is left out")
                return
            yield _line_of(line, f"{path}: line {number}")


def _line_of(text: bytes, where: str) -> dict[str, Any]:
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise InputError(f"{where} is not JSON: {exc}{_REPAIR}") from exc
    if not isinstance(content, dict) or not (type(content.get("level")) is int and type(content.get("attempt")) is int):
        raise InputError(f"{where} has no `level` and `attempt`{_REPAIR}")
    return content


def _first_difference(old: Any, new: Any, where: str = "") -> str:
    """` at load.concurrency: [1, 2], now [1, 4]`; empty if only names or SLOs differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = (
            _first_difference(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
            for key in sorted({*old, *new} - (set() if where else {"name", "slo"}))
        )
        return next(filter(None, found), "")
    return "" if old == new else f" at {where}: {json.dumps(old)}, now {json.dumps(new)}"
