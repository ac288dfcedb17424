"""The kernels compile for a GPU: what Triton's interpreter takes, its compiler may not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_every_kernel_compiles_to_machine_code_for_an_h100(tmp_path):
    """In bfloat16 and the head sizes of Llama 3 8B, with Triton's own assembler."""
    if shutil.which("ptxas") is None:
        bundled = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin"
        if not any(bundled.glob("ptxas*")):
            pytest.skip("this build of Triton brings no assembler")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environ, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert len(sizes) == 8
    assert all(int(size) > 500 for size in sizes.values())
