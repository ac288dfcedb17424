"""Texts of data/texts.csv: each call has its row, and each row its call, with the same fields."""

import ast
import string
from pathlib import Path

import pytest

import lmi_bench
from lmi_bench.core.texts import say, texts

CALLS = [
    (path.name, node)
    for path in sorted(Path(lmi_bench.__file__).parent.rglob("*.py"))
    if "core.texts import say" in (source := path.read_text(encoding="utf-8"))
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say"
]


def fields_of(text):
    """The names that a text asks for, without their attributes."""
    return {
        name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name
    }


@pytest.mark.parametrize(("where", "call"), CALLS)
def test_a_call_gives_its_text_exactly_the_fields_that_it_has(where, call):
    assert {keyword.arg for keyword in call.keywords} == fields_of(texts()[call.args[0].value])


def test_each_text_is_used():
    assert {call.args[0].value for _, call in CALLS} == set(texts())


def test_a_text_is_filled_in():
    assert say("real time engine").startswith("this engine computes in real time")
    assert say("no price", self=type("Budget", (), {"instance": "g5"})) == (
        "the catalog has no price of g5: give --price-per-hour"
    )
