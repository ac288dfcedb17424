"""The last handler: what no command explains is one line, and its trace is kept."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.end_to_end.commands import environment

PROGRAM = """
import sys
import lmi_bench.cli.main
def app(arguments):
    raise {raised}
lmi_bench.cli.main.app = app
sys.argv[1:] = ["sweep", "--out", "runs/a"]
lmi_bench.cli.main.main()
"""


def ended(folder, raised, before=None, **more):
    """Exit code and lines of a command that raises this."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(raised=raised)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**environment(), **more},
        preexec_fn=before,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("raised", "says"), [("ValueError('two\\nlines')", "ValueError: two"), ("MemoryError", "not enough memory")]
)
def test_a_fault_is_one_line_and_its_trace_is_beside_the_run(tmp_path, raised, says):
    code, (line,) = ended(tmp_path, raised)
    (trace,) = (tmp_path / "runs").iterdir()
    assert code == 1
    assert line.startswith("error: internal error: ")
    assert says in line
    assert line.endswith(f"please report it; its trace is in runs/{trace.name}")
    assert trace.read_text().startswith("Traceback")


@pytest.mark.parametrize("name", ["EACCES", "EROFS", "EIO", "ENXIO"])
def test_what_a_disk_or_a_socket_refuses_names_the_path(tmp_path, name):
    code, lines = ended(tmp_path, f"OSError(__import__('errno').{name}, 'no', 'runs/b')")
    assert (code, lines) == (2, ["error: runs/b: no; name another"])


REPORT = """
import os, signal, sys, time
from lmi_bench.cli.main import main
from lmi_bench.jobs import results
def report(settings):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("cleaned up", file=sys.stderr)
results.report = report
sys.argv[1:] = ["report", "a"]
main()
"""


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path):
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()) == (143, ["cleaned up", "terminated"])


def test_the_trace_goes_to_the_terminal_if_that_is_wanted(tmp_path):
    code, lines = ended(tmp_path, "ValueError(1)", LMI_BENCH_DEBUG="1")
    assert (code, lines[0]) == (1, "Traceback (most recent call last):")
    assert lines[-1].endswith("its trace is above")
    assert [*tmp_path.iterdir()] == []


def test_a_fault_is_one_line_where_no_file_can_be_written(tmp_path):
    """As on a full disk, which has no room for a temporary file either."""
    code, lines = ended(tmp_path, "ValueError(1)", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    assert (code, len(lines)) == (1, 1)
    assert "shown with LMI_BENCH_DEBUG=1: runs/lmi-bench-error-" in lines[0]
