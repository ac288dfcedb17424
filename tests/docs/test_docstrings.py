"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import lmi_bench

_ROOT = Path(lmi_bench.__file__).parent
_WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts)
    for path in _ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", _WITH_EXAMPLES)
def test_the_examples_of_a_module_hold(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
