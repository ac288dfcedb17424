"""The library's face: `import lmi_bench`."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import lmi_bench
from lmi_bench.core.option import settings_of
from lmi_bench.jobs.settings.plan import PredictSettings
from tests.end_to_end.commands import modules_loaded_by

ROOT = Path(__file__).parents[2]
FUNCTIONS = [name for name in lmi_bench.__all__ if name.islower() and not name.startswith("_")]


def test_the_import_loads_nothing_else():
    code = "import lmi_bench; dir(lmi_bench); lmi_bench.InputError"
    assert modules_loaded_by(code, ("numpy", "torch", "aiohttp", "pydantic", "typer")) == set()


def test_a_setting_is_known_without_what_computes():
    code = "import lmi_bench; lmi_bench.PredictSettings; help(lmi_bench.predict)"
    assert modules_loaded_by(code, ("numpy", "torch", "aiohttp", "pydantic", "typer")) == set()


def test_everything_that_is_offered_exists_and_has_a_type():
    """A type checker reads the stub, Python the table."""
    stub = ast.parse((ROOT / "lmi_bench/__init__.pyi").read_text("utf-8"))
    typed = {name.asname for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert typed | {"__version__"} == set(lmi_bench.__all__)
    assert all(hasattr(lmi_bench, name) for name in lmi_bench.__all__)
    with pytest.raises(AttributeError, match="no attribute 'prediction'"):
        lmi_bench.prediction  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_lists_every_keyword(name):
    function = getattr(lmi_bench, name)
    text = inspect.getdoc(function)
    keywords = list(inspect.signature(function).parameters)
    assert [each for each in keywords if f"\n{each}\n" not in text] == []
    assert "listener" in keywords
    assert all(part in text for part in ("Returns", "Raises InputError", "Example:"))


def test_keywords_are_the_options_of_the_command():
    parameters = inspect.signature(lmi_bench.predict).parameters
    assert {each.name for each in settings_of(PredictSettings)} | {"listener"} == set(parameters)
    assert parameters["model"].default is inspect.Parameter.empty
    assert parameters["replicas"].default == 1


def test_a_keyword_that_does_not_exist_or_is_missing_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        lmi_bench.predict(modle="llama-2-7b", model="llama-2-7b", instance="ml.g5.2xlarge")
    with pytest.raises(TypeError, match=r"missing a required .*argument: 'instance'"):
        lmi_bench.predict(model="llama-2-7b")


def test_a_list_of_numbers_counts_as_numbers_between_commas():
    asked = {"model": "llama-2-7b", "instance": "ml.g5.2xlarge", "input_tokens": 9, "output_tokens": 9}
    assert lmi_bench.predict(**asked, concurrency=[1, 8]) == lmi_bench.predict(**asked, concurrency="1,8")


def test_the_page_does_what_it_shows(tmp_path, monkeypatch, capsys):
    """Every example of docs/library.md, one after the other."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/library.md").read_text("utf-8")
    known: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/library.md", "exec"), known)
    said = capsys.readouterr().out
    assert re.search(r"^8 users: \d+ tokens/s", said, re.MULTILINE)
    assert re.search(r"^8 users: [\d.]+ ms a token \[", said, re.MULTILINE)
    assert re.search(r"^\d+ x ml.g5", said, re.MULTILINE)
    assert re.search(r"^refused: .*no-such-model", said, re.MULTILINE)
    assert "Llama 2 7B" in (tmp_path / "report.html").read_text("utf-8")
