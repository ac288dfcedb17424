"""All native parts under gcc's sanitizers, with the tests that compare them with Python's results.

    make sanitize
    python benchmarks/sanitize.py [address] [undefined] [thread]

Each sanitizer gets compilers of its own: scripts that add its flags to what `lmi_bench` compiles
with, through CC and CXX, and an empty cache, so that nothing is taken from an earlier build. The
first report ends the process, and so the tests. Python itself is not instrumented: leaks are not
looked for, and of races only those with native code on one side are seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/loadgen/http", "tests/engine/native_backend", "tests/analysis/level/test_native_queue.py")
FLAGS = {
    "address": "-fsanitize=address -fno-omit-frame-pointer -g",
    "undefined": "-fsanitize=undefined -fno-sanitize-recover=all -g",
    "thread": "-fsanitize=thread -fno-omit-frame-pointer -g",
}
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:report_signal_unsafe=0",
}


def compilers(folder: Path, flags: str) -> dict[str, str]:
    """CC and CXX: gcc and g++ with these flags behind the program's own."""
    found = {}
    for variable, name in (("CC", "gcc"), ("CXX", "g++")):
        program = shutil.which(name)
        if program is None:
            sys.exit(f"{name} is not installed; the sanitizers need gcc's compilers and runtimes")
        script = folder / f"{name}-sanitized"
        script.write_text(f'#!/bin/sh\nexec {program} "$@" {flags}\n')
        script.chmod(0o755)
        found[variable] = str(script)
    return found


def run(sanitizer: str, tests: list[str]) -> int:
    """The tests' exit code under a sanitizer."""
    # with the library of C++ exceptions, which a runtime looks for when it starts
    runtime = " ".join(
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in (RUNTIMES[sanitizer], "libstdc++.so.6")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | OPTIONS | compilers(folder, FLAGS[sanitizer])
        environment |= {"XDG_CACHE_HOME": name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= {"PYTHONMALLOC": "malloc", "PYTHONUNBUFFERED": "1"}
        # only Python is preloaded, not the compilers that it starts
        command = ["env", f"LD_PRELOAD={runtime}", sys.executable, "-m", "pytest", "-q", "-x"]
        started_s = time.monotonic()
        print(f"{sanitizer}: {' '.join(tests)}", flush=True)
        code = subprocess.run([*command, "-p", "no:cacheprovider", *tests], cwd=ROOT, env=environment).returncode
        built = sorted(path.stem.partition("-")[0] for path in folder.rglob("*.so"))
    print(f"{sanitizer}: exit {code}, {time.monotonic() - started_s:.0f} s, built {built}", flush=True)
    return code or (0 if {"harvest", "step", "queue"} <= set(built) else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sanitizers", nargs="*", help=f"of {', '.join(FLAGS)}; all of them unless named")
    parser.add_argument("--tests", nargs="*", default=list(TESTS))
    options = parser.parse_args()
    if unknown := set(options.sanitizers) - set(FLAGS):
        parser.error(f"{', '.join(sorted(unknown))}: take {', '.join(FLAGS)}")
    worst = 0
    for sanitizer in options.sanitizers or FLAGS:
        worst = max(worst, abs(run(sanitizer, options.tests)))
    sys.exit(min(worst, 1))


if __name__ == "__main__":
    main()
