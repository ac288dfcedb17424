"""The wheel and the source distribution, built and installed in an environment of their own.

The dependencies are those that the tests run with, so only hatchling is fetched; without a
registry or a copy of it in pip's links these tests are skipped. Other versions of Python, where
this machine has them, fetch the dependencies too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from lmi_bench import __version__

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
PLAIN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*args, cwd=ROOT, **more):
    done = subprocess.run(
        [*map(str, args)], cwd=cwd, env=PLAIN | more, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interpreters(minor):
    """Python 3.`minor` on PATH and among pyenv's versions."""
    name = f"python3.{minor}"
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return [path for path in (shutil.which(name), *sorted(versions.glob(f"3.{minor}.*/bin/{name}"))) if path]


def interpreter(minor):
    """One of them that can make environments."""
    for path in interpreters(minor):
        if not subprocess.call([path, "-c", "import ensurepip, ssl, venv"], stderr=subprocess.DEVNULL):
            return path
    pytest.skip(f"no python3.{minor} here that makes environments")


OTHERS = [n for n in (14, 13, 12, 11) if n != sys.version_info.minor and interpreters(n)]
if "LMI_BENCH_EACH_PYTHON" not in os.environ:  # half a minute for each
    OTHERS = OTHERS[:1]


def environment(folder):
    """The interpreter of a fresh environment with the dependencies of this one."""
    run(sys.executable, "-m", "venv", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    python = environment(tmp_path_factory.mktemp("builder"))
    try:
        run(python, "-m", "pip", "install", "--quiet", "hatchling", PIP_RETRIES="0")
    except (AssertionError, subprocess.TimeoutExpired) as exc:
        pytest.skip(f"hatchling cannot be fetched: {str(exc)[-200:]}")
    return python


def build(builder, kind, out, cwd=ROOT, **environ):
    run(builder, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=cwd, **environ)
    (path,) = out.iterdir()
    return path


def names_in(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_source_distribution_makes_the_same_wheel(builder, tmp_path):
    packed = build(builder, "sdist", tmp_path / "sdist")
    with tarfile.open(packed) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("lmi_bench-*")
    assert {"tests", "benchmarks", "Makefile", "constraints.txt"} <= {p.name for p in source.iterdir()}
    names = names_in(build(builder, "wheel", tmp_path / "one"))
    assert names_in(build(builder, "wheel", tmp_path / "two", cwd=source)) == names
    assert "lmi_bench/core/data/schemas/scenario.schema.json" in names
    assert "lmi_bench/py.typed" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))]


@pytest.mark.parametrize("compiled", [False, True], ids=["any platform", "compiled"])
def test_an_installed_wheel_sweeps_and_reports(builder, tmp_path, compiled):
    if compiled and shutil.which("g++") is None:
        pytest.skip("no g++ here")
    environ = {"LMI_BENCH_COMPILED": "1"} if compiled else {}
    wheel = build(builder, "wheel", tmp_path / "dist", **environ)
    assert wheel.name.endswith("-any.whl") != compiled
    python = environment(tmp_path / "fresh")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    program = python.with_name("lmi-bench")
    assert __version__ in run(program, "--version", cwd=tmp_path)
    where = run(python, "-c", "import lmi_bench; print(lmi_bench.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path / "fresh"))
    load = ("--model", "qwen3-8b", "--isl", "16", "--osl", "4", "--concurrency", "1,2")
    run(program, "sweep", "sim:ml.g5.2xlarge", *load, "--out", "run", cwd=tmp_path)
    run(program, "report", "run", "-o", "run.html", cwd=tmp_path)
    assert (tmp_path / "run.html").read_text().rstrip().endswith("</html>")
    if compiled:
        ask = "from lmi_bench.core.native_build import PARTS, library\nfor part in PARTS: print(library(part))"
        found = run(python, "-c", ask, cwd=tmp_path, PATH="/nowhere", XDG_CACHE_HOME=str(tmp_path))
        shipped = found.splitlines()
        assert [Path(path).name.split("-")[0] for path in shipped] == ["step", "harvest", "queue"]
        assert all(path.startswith(str(tmp_path / "fresh")) for path in shipped)


@pytest.mark.parametrize("minor", OTHERS)
def test_another_python_runs_the_wheel(builder, tmp_path, minor):
    run(interpreter(minor), "-m", "venv", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    wheel = build(builder, "wheel", tmp_path / "dist")
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    run(*pip, "--no-deps", "--no-index", wheel)  # else its bounds forbid this Python
    try:
        run(*pip, wheel, PIP_RETRIES="0")
    except (AssertionError, subprocess.TimeoutExpired) as exc:
        pytest.skip(f"the dependencies cannot be fetched: {str(exc)[-200:]}")
    run(python, "-c", "import lmi_bench", cwd=tmp_path)
    program = python.with_name("lmi-bench")
    assert __version__ in run(program, "--version", cwd=tmp_path)
    load = ("--model", "qwen3-8b", "--isl", "16", "--osl", "4", "--concurrency", "1,2")
    run(program, "sweep", "sim:ml.g5.2xlarge", *load, "--out", "run", cwd=tmp_path)
    assert len((tmp_path / "run" / "levels.jsonl").read_text().splitlines()) == 2
