"""What the command line says and writes stays as it was, over ten scenarios.

Each scenario is a handful of commands in an empty folder (sweeps of simulated instances in virtual
time, recommendations, predictions, reports, deployment files); what they print and every file
that they write is compared with `outputs/`. Only the command line is used, so the modules behind
it may be moved and rewritten freely. Help texts are not part of it.

Masked, since it is true only of the moment and the machine: times of day and today's date,
lmi-bench's version, in a run's manifest (and the report's list of it) the host and the installed
packages, and what a priced sweep cost so far (`elapsed_s`, `spent_usd`), which goes by the wall
clock even in virtual time. Folders are named relatively. Of requests.jsonl the first line, the
last one and their number are kept. Numbers may differ by a billionth, as another order of summing
makes them; texts, keys and the order of keys may not differ at all.

Outputs that are changed on purpose are written anew, and looked through as a diff of git:

    LMI_BENCH_GOLDEN=write python -m pytest tests/golden

`predict --mix` and intervals in closed form are expected to change when what is known to be wrong
with them is mended; until then they are held like the rest. On a machine whose exp or log rounds
otherwise a fit may end more than a billionth away: then compare on the machine that wrote them.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lmi_bench.core.native_build import default_cache_dir
from tests.golden.canonical import masked_text, settled, texts_of
from tests.golden.scenarios import SCENARIOS, Scenario

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs"
SHOWN_LINES = 40
LIMIT_S = 300


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_is_said_and_written_stays(scenario, tmp_path):
    texts, commands = outputs(scenario, tmp_path)
    folder = OUTPUTS / scenario.name
    if os.environ.get("LMI_BENCH_GOLDEN") == "write":
        kept = read(folder) if folder.exists() else {}
        ended = [name for name in {*texts} & {*kept} if _exit(texts[name]) != _exit(kept[name])]
        assert not ended, f"ends with another exit code now: remove the folder first: {ended}"
        write(folder, texts)
        return
    kept = read(folder)
    assert sorted(texts) == sorted(kept), "other files are written than those that are kept"
    differences = {
        name: difference(name, kept[name], settled(name, texts[name], kept[name]), commands[name]) for name in texts
    }
    shown = [name for name, each in differences.items() if each]
    if shown:
        others = "".join(f"\nalso another: {name}" for name in shown[1:])
        pytest.fail(differences[shown[0]] + others, pytrace=False)


def test_every_kept_output_belongs_to_a_scenario():
    assert {path.name for path in OUTPUTS.iterdir()} == {each.name for each in SCENARIOS}


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("a.json", '{"p50": 0.30000000000000004, "std": 2.1e-12, "n": 3}\n'),
        ("levels.jsonl.txt", '{"p50": 0.3, "std": 1e-13, "n": 3}\n'),
        ("levels.csv", '{"p50": 0.30000000000000004, "std": 0.000000000002, "n": 3}\n'),
    ],
)
def test_a_difference_by_rounding_is_none(name, now):
    kept = '{"p50": 0.3, "std": 0.0, "n": 3}\n'
    assert settled(name, now, kept) == kept


@pytest.mark.parametrize(
    "now",
    [
        '{"p50": 0.3000001, "std": 0.0, "n": 3}\n',
        '{"p50": 0.3, "std": 0.0, "n": 4}\n',
        '{"p50": 0.3, "std": 0, "n": 3}\n',
        '{"std": 0.0, "p50": 0.3, "n": 3}\n',
        '{"p50": 0.3, "std": 0.0}\n',
        '{"p50": 0.3, "std": 0.0, "n": 3}\n{"p50": 0.3, "std": 0.0, "n": 3}\n',
        "",
    ],
)
def test_another_number_key_order_or_line_is_shown_with_its_command(now):
    kept = '{"p50": 0.3, "std": 0.0, "n": 3}\n'
    shown = difference("a.json", kept, settled("a.json", now, kept), "lmi-bench sweep")
    assert shown.startswith("lmi-bench sweep\n--- kept/a.json\n+++ now/a.json")


def outputs(scenario: Scenario, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of a scenario by name, and the command that each of them comes from."""
    for name, content in scenario.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    days = [_today()]
    results = _run(scenario.commands, folder)
    days = (*days, _today())
    texts: dict[str, str] = {}
    commands: dict[str, str] = {}
    for number, (words, result) in enumerate(zip(scenario.commands, results, strict=True)):
        line = shlex.join(["lmi-bench", *words])
        found = {f"said/{number:02}-{words[0]}.txt": _transcript(line, result, days)}
        for path in result["wrote"]:
            if not path.endswith(".lock"):
                found |= texts_of(path, (folder / path).read_text(encoding="utf-8"), days)
        texts |= found
        commands |= dict.fromkeys(found, line)
    return texts, commands


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _transcript(line: str, result: dict[str, Any], days: tuple[str, ...]) -> str:
    text = f"$ {line}\n{result['stdout']}\n-- stderr\n{result['stderr']}\n-- exit {result['exit']}"
    return masked_text(text, days)


def _run(commands: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    said = folder.parent / f"{folder.name}-said.json"
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(default_cache_dir().parents[1]),  # compiled parts are no output
        "PYTHONPATH": str(HERE.parent.parent),
        "PYTHONUTF8": "1",
        "COLUMNS": "180",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    } | {key: value for key, value in os.environ.items() if key == "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "driver.py"), str(said)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results: list[dict[str, Any]] = json.loads(said.read_text(encoding="utf-8"))
    return results


def read(folder: Path) -> dict[str, str]:
    """The kept texts of a scenario by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


def _exit(text: str) -> str:
    """The last line of what a command says, its exit code; empty for a file."""
    return text.rstrip().rpartition("\n-- exit ")[2] if "\n-- exit " in text else ""


def write(folder: Path, texts: dict[str, str]) -> None:
    """Keep these texts and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def difference(name: str, kept: str, actual: str, command: str) -> str:
    """The command and the first lines of a unified diff; empty where there is none."""
    lines = difflib.unified_diff(kept.splitlines(), actual.splitlines(), f"kept/{name}", f"now/{name}", lineterm="")
    shown = "\n".join(islice(lines, SHOWN_LINES))
    return f"{command}\n{shown}" if shown else ""
