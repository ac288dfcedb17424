"""Runs `lmi-bench` as a user types it, and holds a figure of the posts against what it gave.

Every command runs once, in a folder of its own, with the program of this checkout. `--json` and
`--out` are added where a command has them, so that figures are read and not cut from a table.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
AGREES, DIFFERS, NEEDS_GPU = "agrees", "differs because", "cannot be shown without a GPU"
_WITH_JSON = ("explain", "predict", "recommend", "validate", "compare-accelerators", "doctor")


@dataclass(frozen=True)
class Output:
    """What one command printed, its exit code, and its JSON; of a sweep its levels and knees.

    text   of stdout; notes: of stderr
    """

    text: str
    notes: str
    code: int
    data: Any
    seconds: float

    def term(self, quantity: str) -> float:
        """The value of a line of `explain`."""
        values = [t["value"] for t in self.data["terms"] if t["quantity"].startswith(quantity)]
        if not values or values[0] is None:
            raise LookupError(f"explain has no value of {quantity!r}")
        return float(values[0])

    def levels(self, key: str) -> dict[int, float]:
        """A figure of a sweep's levels by users; `a.b` is b of a."""
        found = {}
        for line in self.data["levels"]:
            value: Any = line
            for part in key.split("."):
                value = value[part]
            found[int(line["concurrency"])] = float(value)
        return found

    def requests(self, key: str) -> list[int]:
        """A field of every request of a sweep."""
        return [int(each[key]) for each in self.data["requests"]]

    def predicted(self, key: str) -> dict[int, dict[str, float]]:
        """A figure of `predict` by users: predicted, low and high."""
        return {int(each["concurrency"]): each[key] for each in self.data["predictions"]}


@dataclass
class Program:
    """The program of this checkout; results are kept, so that claims may share a command."""

    folder: Path
    say: Callable[[str], None] = print
    _known: dict[str, Output] = field(default_factory=dict)
    _count: int = 0

    def run(self, command: str) -> Output:
        """The output of a command. Raises RuntimeError with its last lines if it fails."""
        if command not in self._known:
            self._known[command] = self._run(command)
        return self._known[command]

    def again(self, command: str) -> Output:
        """The same without the memory, for what is measured in turns."""
        return self._run(command)

    def _run(self, command: str) -> Output:
        self.say(f"  {shown(command)}")
        self._count += 1
        place = self.folder / f"{self._count:03d}"
        place.mkdir()
        words = shlex.split(command.replace("DIR", str(self.folder / "kept")))
        if words[0] in _WITH_JSON:
            words += ["--json", str(place / "out.json")]
        if words[0] == "sweep":
            words += ["--out", str(place / "run")]
        if words[:2] == ["deploy", "write"]:
            words += ["--out", str(place / "files")]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
        started_s = time.monotonic()
        called = words[1:] if words[0] == "python" else ["-m", "lmi_bench", *words]
        ran = subprocess.run(
            [sys.executable, *called], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"lmi-bench {command}: exit {ran.returncode}\n{ran.stderr[-2000:]}")
        seconds = time.monotonic() - started_s
        return Output(ran.stdout, ran.stderr, ran.returncode, _data(place), seconds)


def shown(command: str) -> str:
    """The command as a user types it; `python` calls the library."""
    return command if command.startswith("python ") else f"lmi-bench {command}"


def _data(place: Path) -> Any:
    if (place / "out.json").exists():
        return json.loads((place / "out.json").read_text(encoding="utf-8"))
    if (place / "run" / "levels.jsonl").exists():
        run = place / "run"
        return {
            "knees": json.loads((run / "knees.json").read_text(encoding="utf-8")),
            **{name: _lines(run / f"{name}.jsonl") for name in ("levels", "requests")},
        }
    if (place / "files").exists():
        return {path.name: path.read_text() for path in (place / "files").iterdir()}
    return None


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Shown:
    """What the program gave for a claim, and whether it agrees; None where it takes a GPU."""

    text: str
    agrees: bool | None


def near(value: float, claimed: float, tolerance: float, unit: str = "") -> Shown:
    """Agrees within a relative tolerance."""
    return Shown(f"{_number(value)} {unit}".strip(), abs(value / claimed - 1) <= tolerance)


def points(value: float, claimed: float, tolerance: float, unit: str = "%") -> Shown:
    """Agrees within an absolute tolerance in the unit itself."""
    return Shown(f"{_number(value)} {unit}".strip(), abs(value - claimed) <= tolerance)


def inside(figure: dict[str, float], claimed: float, unit: str) -> Shown:
    """Agrees where the 80 % interval of a prediction holds the claimed figure."""
    low, high = figure["low"], figure["high"]
    text = f"{_number(figure['predicted'])} {unit} ({_number(low)} to {_number(high)})"
    return Shown(text, low <= claimed <= high)


def same(value: object, claimed: object, text: str = "") -> Shown:
    """Agrees where both are equal."""
    return Shown(text or str(value), value == claimed)


def every(*shown: Shown) -> Shown:
    """Agrees where each part does."""
    return Shown("; ".join(each.text for each in shown), all(each.agrees for each in shown))


def _number(value: float) -> str:
    size = abs(value)
    if value == int(value) and size < 1e7:
        return f"{int(value):,}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Claim:
    """One claim of a post: our short wording of it, its figure, and how the program shows it.

    shows    the commands whose outputs `check` gets, in order
    how      computed, predicted, simulated, measured or run
    allowed  the tolerance in words
    why      the physical or arithmetical reason, needed where the program's figure differs
    """

    id: str
    said: str
    figure: str
    shows: tuple[str, ...]
    how: str
    check: Callable[..., Shown]
    allowed: str = "equal"
    why: str = ""

    def verdict(self, program: Program) -> tuple[str, str]:
        """The figure that the program gives, and the verdict."""
        shown = self.check(*(program.run(command) for command in self.shows))
        if shown.agrees is None:
            return shown.text, f"{NEEDS_GPU}: {self.why}"
        if shown.agrees:
            return shown.text, f"{AGREES} ({self.allowed})"
        if not self.why:
            raise ValueError(f"{self.id} differs ({shown.text}) and no reason is stated")
        return shown.text, f"{DIFFERS} {self.why}"


def one_of(verdict: str) -> str:
    """The kind of a verdict."""
    return next(kind for kind in (AGREES, DIFFERS, NEEDS_GPU) if verdict.startswith(kind))


def by_id(claims: Sequence[Claim]) -> dict[str, Claim]:
    found = {claim.id: claim for claim in claims}
    if len(found) != len(claims):
        raise ValueError("two claims have one id")
    return found
