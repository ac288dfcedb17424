"""Sizes that keep the package readable: folders, files, functions."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lmi_bench"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_FILES, MOST_LINES, MOST_LINES_A_FUNCTION = 32, 500, 60

# one kernel, and one pass over the bytes of a response whose order is its speed
LONGER = {"engine/triton_backend/kernels.py:paged_attention_kernel", "loadgen/http/answer.py:decode_answer"}


def test_a_folder_has_at_most_32_files():
    counts = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in SOURCES)
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


def test_a_file_has_at_most_500_lines():
    long = {path.name for path in SOURCES if path.read_text("utf-8").count("\n") > MOST_LINES}
    assert long == set()


def test_a_function_has_at_most_60_lines():
    long = {
        f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES_A_FUNCTION
    }
    assert long == LONGER
