"""Files with wrong values or torn bytes, and a command that reads them, many times."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import traceback
from copy import deepcopy

import pytest
import typer.main
import yaml

from lmi_bench.cli import main as cli
from lmi_bench.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_SLO_MISSED,
    EXIT_TERMINATED,
)
from tests.fuzz.torn import torn

SEED = int(os.environ.get("LMI_BENCH_FUZZ_SEED", "0"))
MOST_CPU_S, MOST_S = 10, 300  # of one file; a busy machine takes longer for the same work
CODES = (EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_SLO_MISSED, EXIT_INTERRUPTED, EXIT_TERMINATED)
NASTY = (
    *(None, True, -1, 0, 1e308, -5.5, float("nan"), 10**400, 2**70, 1e-320, 1e12, 10**6),
    *("", "x", "<script>", "inf", "9" * 300, "\ud800", "../../x", "2026-13-45"),
    *([], {}, [1], {"a": 1}, [[[[1]]]]),
)
COMMANDS = typer.main.get_command(cli.app)  # made once: half of a call's time


class HangError(Exception):
    """A command took longer than any of these may."""


class FaultError(Exception):
    """A command ended in an internal error, or with a code of its own."""


def run(*arguments):
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        COMMANDS.main([str(each) for each in arguments], standalone_mode=False)
    return out.getvalue()


def call(*arguments):
    """Run a command by the program's own last handler; what that explains is no fault."""
    out, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        patch.setattr("sys.argv", ["lmi-bench", *map(str, arguments)])
        patch.setattr(cli, "app", COMMANDS.main)
        patch.setenv("LMI_BENCH_DEBUG", "1")  # no file with a trace
        try:
            cli.main()
        except SystemExit as exc:
            code = exc.code or 0
    said = out.getvalue()
    if code not in CODES or "internal error" in said or "Traceback" in said:
        frames = re.findall(r'File "(.+)", line (\d+)', said)[-3:]
        raise FaultError(f"exit {code}, {said.strip()[-200:]!r} at {frames}")


def places(value, place=()):
    """Every place in a JSON value, of a list the first six."""
    yield place
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value[:6]) if isinstance(value, list) else inner
    for key, each in inner:
        yield from places(each, (*place, key))


def wrong(value, draw):
    """The value with one to three wrong values, or without a key."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = draw.choice([*places(value)])
        if not place:
            return deepcopy(draw.choice(NASTY))
        holder = value
        for key in place[:-1]:
            holder = holder[key]
        if isinstance(holder, dict) and draw.random() < 0.2:
            del holder[place[-1]]
        else:
            holder[place[-1]] = deepcopy(draw.choice(NASTY))
    return value


def damage(file, draw):
    """Put wrong values into a file, as its suffix says how, or tear its bytes."""
    form = file.suffix
    if form == ".safetensors" and draw.random() < 0.75:
        data = file.read_bytes()
        end = 8 + struct.unpack_from("<Q", data)[0]
        header = json.dumps(wrong(json.loads(data[8:end]), draw)).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])
    elif form not in _WRONG or draw.random() < 0.25:
        file.write_bytes(torn(file.read_bytes(), draw))
    else:
        text = _WRONG[form](file.read_text("utf-8"), draw)
        file.write_text(text, "utf-8", errors="surrogatepass")


def _wrong_lines(text, draw):
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(wrong(json.loads(lines[at]), draw))
    return "\n".join(lines) + "\n"


def _wrong_table(text, draw):
    rows = [*csv.reader(text.splitlines())]
    for _ in range(draw.choice((1, 1, 2, 3))):
        row = draw.choice(rows[:6])
        if not row or draw.random() < 0.1:
            row.append(str(draw.choice(NASTY)))
        elif draw.random() < 0.1:
            del row[draw.randrange(len(row))]
        else:
            row[draw.randrange(len(row))] = str(draw.choice(NASTY))
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


_WRONG = {
    ".json": lambda text, draw: json.dumps(wrong(json.loads(text), draw)),
    ".jsonl": _wrong_lines,
    ".yaml": lambda text, draw: yaml.safe_dump(wrong(yaml.safe_load(text), draw)),
    ".csv": _wrong_table,
}


def find(seeds, tmp_path, one):
    """What ended otherwise than in a line: `one` gets an empty folder and a random generator."""
    failed = []
    gc.collect()
    gc.freeze()  # each level of a sweep collects: 0.5 s with what a process has imported by now

    hung = []

    def too_long(*_):
        hung.append(seed)  # an event loop's callback or a finalizer swallows what is raised in it
        raise HangError

    before = [(each, signal.signal(each, too_long)) for each in (signal.SIGPROF, signal.SIGALRM)]
    for seed in seeds:
        folder = tmp_path / "damaged"
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        signal.alarm(MOST_S)
        try:
            one(folder, random.Random(seed))
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # noqa: BLE001 - what ends otherwise is the finding
            places = traceback.extract_tb(exc.__traceback__)
            place = places[-2 if isinstance(exc, HangError) else -1]  # not the signal's handler
            most = 600 if isinstance(exc, FaultError) else 80
            failed.append(f"seed {seed}: {exc!r:.{most}} at {place.filename}:{place.lineno}")
        else:
            failed += [f"seed {seed}: took too long" for _ in hung]
        finally:
            hung.clear()
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            shutil.rmtree(folder, ignore_errors=True)
    for each, handler in before:
        signal.signal(each, handler)
    return failed
