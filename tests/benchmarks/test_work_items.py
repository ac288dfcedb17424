"""Work items: in their order whoever runs them, and none twice where their results are kept."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.support.work_items import add_options, mapped
from tests.end_to_end.commands import environment

ROOT = Path(__file__).parents[2]


def noted(number: int, folder: str) -> dict[str, int]:
    """The square; a file for each time that it was computed. Beside others 5 waits for 1."""
    last = Path(folder, "1-0")
    while number == 5 and Path(folder).name == "beside" and not last.exists():
        time.sleep(0.01)
    made = len(list(Path(folder).glob(f"{number}-*")))
    Path(folder, f"{number}-{made}").touch()
    if number == 7:
        raise ValueError("seven")
    return {"square": number * number}


def options_of(*args):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args([str(each) for each in args])


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_in_the_order_of_the_items_and_computed_once(workers, tmp_path):
    calls, kept = tmp_path / ("beside" if workers > 1 else "calls"), tmp_path / "kept"
    calls.mkdir()
    items = [(number, str(calls)) for number in (5, 3, 4, 1)]
    options = options_of("--workers", workers, "--keep", kept)
    told = []
    for _ in range(2):
        found = mapped(noted, items, options, lambda item, _: told.append(item[0]))
        assert [each["square"] for each in found] == [25, 9, 16, 1]
    assert sorted(told) == [1, 3, 4, 5]
    assert sorted(each.name for each in calls.iterdir()) == ["1-0", "3-0", "4-0", "5-0"]
    mapped(noted, [*items, (6, str(calls))], options)
    assert sorted(each.name for each in calls.iterdir())[-1] == "6-0"


def test_an_item_that_fails_raises_and_loses_no_other(tmp_path):
    items = [(number, str(tmp_path)) for number in (1, 2, 7)]
    kept = tmp_path / "kept"
    with pytest.raises(ValueError, match="seven"):
        mapped(noted, items, options_of("--workers", 1, "--keep", kept))
    assert len(list(kept.iterdir())) == 2


def test_a_killed_run_goes_on_behind_what_it_has(tmp_path):
    """The third item waits for a file that is only there the second time."""
    program = (
        "import argparse, pathlib, sys, time\n"
        "from benchmarks.support.work_items import mapped\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "def work(number):\n"
        "    (folder / f'began-{number}-{time.monotonic_ns()}').touch()\n"
        "    while number == 3 and not (folder / 'go').exists():\n"
        "        time.sleep(0.01)\n"
        "    return number\n"
        "given = argparse.Namespace(workers=1, ray=None, keep=folder / 'kept')\n"
        "print(mapped(work, [[1], [2], [3], [4]], given))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    where = {"cwd": ROOT, "env": {**environment(), "PYTHONPATH": str(ROOT)}}
    first = subprocess.Popen(command, **where)
    while not list(tmp_path.glob("began-3-*")):
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (tmp_path / "go").touch()
    again = subprocess.run(command, **where, capture_output=True, text=True, check=True)
    assert again.stdout == "[1, 2, 3, 4]\n"
    began = [len(list(tmp_path.glob(f"began-{number}-*"))) for number in (1, 2, 3, 4)]
    assert began == [1, 1, 2, 1]
