"""The kernels compile for a GPU: what Triton's interpreter takes, its compiler may not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
H100_SHARED_BYTES = 227 * 1024  # a block's most, CUDA C programming guide, capability 9.0


def test_every_kernel_compiles_to_machine_code_for_an_h100(tmp_path):
    """In bfloat16 and the head sizes of Llama 3 8B, with Triton's own assembler; attention in the
    other formats and in sizes that would not fit were a page read at once."""
    if shutil.which("ptxas") is None:
        bundled = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin"
        if not any(bundled.glob("ptxas*")):
            pytest.skip("this build of Triton brings no assembler")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [line.split("\t") for line in done.stdout.splitlines()]
    assert len({name.split(" ")[0] for name, _, _ in made}) == 9
    for name, code_bytes, shared_bytes in made:
        assert int(code_bytes) > 500, name
        assert int(shared_bytes) <= H100_SHARED_BYTES, name
