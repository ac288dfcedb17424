"""Runs several `lmi-bench` commands in one process, as a shell would one after another.

    echo '[["sweep", "--target", "sim:ml.g5.2xlarge", "--out", "run"]]' | python driver.py said.json

Started in an empty folder with the product on PYTHONPATH. It knows one name of the product, the
entry point that `python -m lmi_bench` runs, so it stays as it is however the modules are moved.
Only the interpreter's start is shared: a process for each command would cost half a second more
for each.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from lmi_bench.__main__ import main


def run(arguments: list[str]) -> dict[str, Any]:
    """One command: exit code, what it said, and the files that it wrote or changed."""
    before = _files()
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["lmi-bench", *arguments]
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    wrote = [name for name, state in _files().items() if before.get(name) != state]
    return {"exit": code, "stdout": out.getvalue(), "stderr": err.getvalue(), "wrote": wrote}


def _files() -> dict[str, tuple[int, int]]:
    found = (path for path in sorted(Path().rglob("*")) if path.is_file())
    return {path.as_posix(): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([run(each) for each in json.load(sys.stdin)]), "utf-8")
