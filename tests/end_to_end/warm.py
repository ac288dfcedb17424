"""Runs commands in processes that are forked off a warm one.

Most of a short command's time is spent importing libraries. This process imports them once; each
command still gets a process of its own, with its own environment, folder, output and exit code.
It is a script of its own: it starts no thread and computes nothing before it forks.

A line of JSON on stdin asks for a command; the answers are its pid, then its exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path

WARM = (
    "aiohttp",
    "boto3",
    "numpy",
    "pydantic",
    "rich.console",
    "rich.progress",
    "rich.table",
    "scipy.special",
    "torch",
    "typer",
    "yaml",
    "lmi_bench.cli.main",
    "lmi_bench.cli.plan_print",
    "lmi_bench.cli.recommend_print",
    "lmi_bench.cli.sweep_print",
    "lmi_bench.engine.async_engine",
    "lmi_bench.jobs.recommend",
    "lmi_bench.jobs.sweep.run",
    "lmi_bench.report.html",
)


def main() -> None:
    """Answer until stdin ends; a command's process leaves as the command exits."""
    answers = os.fdopen(os.dup(1), "w")
    sys.path[0] = str(Path(__file__).parents[2])
    for name in WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            run(asked)
            return
        print(pid, file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def run(asked: dict[str, object]) -> None:
    """Run the command in this process, as `python -m lmi_bench` does."""
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(asked["env"])  # type: ignore[call-overload]
    for fd, name in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
        mode = os.O_WRONLY | os.O_CREAT if fd else os.O_RDONLY
        opened = os.open(str(name), mode)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv[1:] = asked["args"]  # type: ignore[call-overload]
    runpy.run_module("lmi_bench", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
