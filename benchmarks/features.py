"""Runs a command for every row of docs/features.md and fails at the first that shows nothing.

    make features                                  all rows, from a clean checkout
    python benchmarks/features.py --rows 12,13     some rows, of the working tree

`benchmarks/features/*.yaml` hold the commands in order. An entry has

    rows    the rows that it shows
    run     what a user types, several lines of bash; `lmi-bench` is the program of the checkout
    serve   servers to start before it, each with `--port $PORT`; the second one gets $PORT2
    files   files to write before it, by name
    prepare commands to run before the servers start
    code    its exit code, 0 if not stated
    out     regular expressions that the output (of a server, too) must have
    absent  regular expressions that it must not have
    holds   Python expressions that must hold: `out` is the output, `level(RUN)` the last level of a
            run and `level(RUN, 3)` that of 3 users, `number(REGEX)` the number in it, `data(FILE)`
            a file's JSON, `text(FILE)` its text, `steps(TRACE)` the engine's steps of a trace

The commands run in one temporary folder, so that a later one may read what an earlier one wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
ENTRIES = Path(__file__).parent / "features"
PAGE = ROOT / "docs" / "features.md"
_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \|", re.MULTILINE)
_READY = re.compile(r"serving .* at http")
_START_LIMIT_S = 300


@dataclass(frozen=True)
class Entry:
    """A command and what it must show; see the module's docstring."""

    rows: tuple[int, ...]
    run: str
    prepare: str = ""
    serve: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    code: int = 0
    out: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    limit_s: float = 300.0

    @property
    def is_judged(self) -> bool:
        """Whether more than the exit code is looked at."""
        return bool(self.out or self.holds)


def entries() -> list[Entry]:
    """All entries in order. Raises ValueError for one that expects nothing."""
    found = []
    for path in sorted(ENTRIES.glob("*.yaml")):
        for raw in yaml.safe_load(path.read_text(encoding="utf-8")):
            lists = {
                key: tuple([raw[key]] if isinstance(raw[key], (str, int)) else raw[key])
                for key in ("rows", "serve", "out", "absent", "holds")
                if key in raw
            }
            entry = Entry(**{**raw, **lists})
            if not entry.is_judged:
                raise ValueError(f"rows {entry.rows}: nothing is expected of the output")
            found.append(entry)
    return found


def rows_of_page() -> dict[int, str]:
    """The features of the page by number."""
    return {int(n): name.strip() for n, name in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


@dataclass
class Place:
    """The folder in which the commands run, with the checkout's files and its `lmi-bench`."""

    folder: Path
    checkout: Path

    def __post_init__(self) -> None:
        tools = self.folder / "bin"
        tools.mkdir()
        for name, words in (("lmi-bench", "-m lmi_bench"), ("python", "")):
            script = tools / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            script.chmod(0o755)
        for name in ("scenarios", "recipes", "tests", "benchmarks"):
            (self.folder / name).symlink_to(self.checkout / name)

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.checkout),
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }
        return os.environ | own

    def level(self, run: str, users: int | None = None) -> dict[str, Any]:
        lines = self.text(f"{run}/levels.jsonl").splitlines()
        levels = [json.loads(line) for line in lines]
        return next(l for l in reversed(levels) if users in (None, l["concurrency"]))  # noqa: E741

    def steps(self, name: str) -> list[dict[str, Any]]:
        """The engine's steps of a trace in order: their kinds with how many rows, and tokens."""
        spans = [each for each in self.data(name) if each.get("ph") == "X" and each["pid"] == 1]
        return [each["args"] | {"name": each["name"]} for each in spans]

    def data(self, name: str) -> Any:
        return json.loads(self.text(name))

    def text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def servers(place: Place, commands: Sequence[str]) -> Iterator[tuple[dict[str, str], list[Path]]]:
    """The servers, ready, with their ports and the files of what they print; ended by id."""
    ports: dict[str, str] = {}
    logs: list[Path] = []
    running = []
    try:
        for number, text in enumerate(commands):
            name = f"PORT{number + 1}" if number else "PORT"
            ports[name] = str(free_port())
            log = place.folder / f"server-{ports[name]}.log"
            with log.open("w") as file:
                process = subprocess.Popen(
                    ["bash", "-c", f"exec {text}"],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=place.folder,
                    env=place.environment | ports,
                    start_new_session=True,
                )
            running.append(process)
            logs.append(log)
            end = time.monotonic() + _START_LIMIT_S
            while not _READY.search(log.read_text()):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{text}: did not start\n{log.read_text()[-1500:]}")
                time.sleep(0.1)
        yield ports, logs
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def shown_by(place: Place, entry: Entry) -> str | None:
    """Why an entry does not show its rows; None if it does."""
    for name, content in entry.files.items():
        (place.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (place.folder / name).write_text(content, encoding="utf-8")
    try:
        if entry.prepare:
            command = ["bash", "-ec", entry.prepare]
            subprocess.run(command, cwd=place.folder, env=place.environment, check=True)
        with servers(place, entry.serve) as (ports, logs):
            ran = subprocess.run(
                ["bash", "-c", entry.run],
                capture_output=True,
                text=True,
                cwd=place.folder,
                env=place.environment | ports,
                timeout=entry.limit_s,
                check=False,
            )
        printed = ran.stdout + ran.stderr + "".join(log.read_text() for log in logs)
    except (RuntimeError, subprocess.SubprocessError) as exc:
        return str(exc)
    if ran.returncode != entry.code:
        return f"exit {ran.returncode} instead of {entry.code}\n{printed[-1500:]}"
    for pattern in entry.out:
        if not re.search(pattern, printed, re.MULTILINE):
            return f"no {pattern!r} in\n{printed[-2500:]}"
    for pattern in entry.absent:
        if re.search(pattern, printed, re.MULTILINE):
            return f"{pattern!r} in\n{printed[-2500:]}"
    return _untrue(place, entry.holds, printed)


def _untrue(place: Place, expressions: Sequence[str], printed: str) -> str | None:
    def number(pattern: str) -> float:
        found = re.search(pattern, printed, re.MULTILINE)
        if found is None:
            raise LookupError(f"no {pattern!r} in\n{printed[-1500:]}")
        return float(found[1].replace(",", ""))

    names = {"out": printed, "number": number, "re": re, "Path": place.folder.joinpath}
    names |= {"level": place.level, "data": place.data, "text": place.text, "steps": place.steps}
    for expression in expressions:
        try:
            holds = eval(expression, names)
        except Exception as exc:
            return f"{expression}: {type(exc).__name__}: {exc}\n{printed[-1500:]}"
        if not holds:
            return f"not true: {expression}\n{printed[-1500:]}"
    return None


def run_all(place: Place, wanted: Sequence[Entry], names: dict[int, str], *, goes_on: bool = False) -> int:
    """Run the entries; the exit code. goes_on: also after one that shows nothing."""
    started_s = time.monotonic()
    failed = []
    for number, entry in enumerate(wanted):
        begun_s = time.monotonic()
        rows = ", ".join(map(str, entry.rows))
        title = names[entry.rows[0]]
        problem = shown_by(place, entry)
        now_s = time.monotonic()
        print(
            f"{number + 1:3d}/{len(wanted)} {now_s - started_s:5.0f} s  {now_s - begun_s:5.1f} s  rows {rows}: {title}",
            flush=True,
        )
        if problem is not None:
            print(f"\nrow {rows} is not shown by\n{entry.run}\n\n{problem}", flush=True)
            failed.append(rows)
            if not goes_on:
                return 1
    if failed:
        print(f"not shown: {'; '.join(failed)}")
        return 1
    shown = {row for entry in wanted for row in entry.rows}
    print(f"{len(shown)} rows shown in {(time.monotonic() - started_s) / 60:.1f} minutes")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="some rows, of the working tree")
    parser.add_argument("--go-on", action="store_true", help="run on after a row that fails")
    given = parser.parse_args()
    names = rows_of_page()
    wanted = entries()
    rows = {int(number) for number in given.rows.split(",") if number}
    if rows:
        wanted = [entry for entry in wanted if rows & {*entry.rows}]
    else:
        missing = set(names) - {row for entry in wanted for row in entry.rows}
        if missing:
            sys.exit(f"rows without a command: {', '.join(map(str, sorted(missing)))}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkout = ROOT
        if not rows:
            checkout = folder / "checkout"
            subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        work = folder / "work"
        work.mkdir()
        code = run_all(Place(work, checkout), wanted, names, goes_on=given.go_on)
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
