"""serving.properties as Java reads them, and the environment that may stand in for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.core.errors import InputError
from lmi_bench.deploy.option_table import effective_settings, environment_of, untranslated_variables
from lmi_bench.deploy.properties import parse_properties, read_properties, render_properties

FILES = Path(__file__).parents[1] / "data" / "deploy"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=b\\\\\nc=d\n", {"a": "b\\", "c": "d"}),  # an escaped backslash ends its line
        ("a=b\\\\\\\nc=d\n", {"a": "b\\c=d"}),
        ("a=b\\", {"a": "b"}),
    ],
)
def test_an_odd_number_of_backslashes_continues_a_line(text, values):
    """java.util.Properties: a line terminator is escaped by an odd number of backslashes."""
    assert parse_properties(text) == values


def test_separators_comments_continuations_and_escapes_are_javas():
    """What java.util.Properties documents for these lines."""
    text = (
        "# a comment\n! another\n\n  Truth = Beauty\n Truth2:Beauty\nTruth3 \t Beauty\nfruits  "
        'apple, banana, \\\n   pear\ncheeses\npath=c:\\\\x\ntab=a\\tb\njson={"a": 1}\n'
    )
    assert parse_properties(text) == {
        "Truth": "Beauty",
        "Truth2": "Beauty",
        "Truth3": "Beauty",
        "fruits": "apple, banana, pear",
        "cheeses": "",
        "path": "c:\\x",
        "tab": "a\tb",
        "json": '{"a": 1}',
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("falcon_dynamic", {"engine": "Python", "batch_size": "4", "max_batch_delay": "100"}),
        ("falcon_continuous", {"option.paged_attention": "False"}),
        ("falcon_paged", {"option.paged_attention": "True", "engine": "MPI"}),
        ("mistral_tensorrt", {"option.model_loading_timeout": "7200"}),
    ],
)
def test_files_of_2023_are_read(name, expected):
    values = read_properties(FILES / f"{name}.properties")
    assert expected.items() <= values.items()
    assert values["option.model_id"].count("/") == 1


def test_a_key_that_stands_twice_with_two_values_is_refused_with_its_line():
    assert parse_properties("a=1\na=1") == {"a": "1"}
    with pytest.raises(InputError, match="line 3: batch_size is '4' above and '8' here"):
        parse_properties("batch_size=4\n# then\nbatch_size=8")


keys = st.from_regex(r"[a-z][a-zA-Z._]{0,12}", fullmatch=True)
values = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just("\n"))


@given(st.dictionaries(keys, values.map(str.strip)))
def test_what_is_written_reads_back_the_same(settings):
    assert parse_properties(render_properties(settings, comments=("said", "so"))) == settings


def test_the_file_beats_every_variable_and_the_regular_one_the_short_one():
    environ = {
        "OPTION_MAX_ROLLING_BATCH_SIZE": "16",
        "OPTION_DTYPE": "bf16",
        "TENSOR_PARALLEL_DEGREE": "2",
        "OPTION_TENSOR_PARALLEL_DEGREE": "4",
        "SM_NUM_GPUS": "8",
        "HF_MODEL_ID": "org/model",
        "MAX_CONCURRENT_REQUESTS": "500",
        "ENABLE_CUDA_GRAPHS": "true",
        "OPTION_EMPTY": "",
    }
    settings = effective_settings({"option.max_rolling_batch_size": "64"}, environ, source="serving.properties")
    assert {name: (s.value, s.origin) for name, s in settings.items()} == {
        "option.max_rolling_batch_size": ("64", "serving.properties"),
        "option.dtype": ("bf16", "OPTION_DTYPE"),
        "option.tensor_parallel_degree": ("4", "OPTION_TENSOR_PARALLEL_DEGREE"),
        "option.model_id": ("org/model", "HF_MODEL_ID"),
        "job_queue_size": ("500", "MAX_CONCURRENT_REQUESTS"),
        "option.enforce_eager": ("false", "ENABLE_CUDA_GRAPHS"),
    }


def test_a_short_name_beats_tgis():
    environ = {"TENSOR_PARALLEL_DEGREE": "2", "SM_NUM_GPUS": "8"}
    assert effective_settings({}, environ, source="")["option.tensor_parallel_degree"].value == "2"


def test_limits_that_only_tgi_reads_are_named():
    environ = {"MAX_TOTAL_TOKENS": "4096", "MAX_INPUT_LENGTH": "4095", "MAX_BATCH_TOTAL_TOKENS": ""}
    assert untranslated_variables(environ) == ["MAX_INPUT_LENGTH", "MAX_TOTAL_TOKENS"]


def test_variables_mean_what_the_file_they_came_from_means():
    file = read_properties(FILES / "falcon_continuous.properties") | {"batch_size": "1"}
    environ = environment_of(file)
    assert environ["HF_MODEL_ID"] == "tiiuae/falcon-40b"
    back = effective_settings({}, environ, source="")
    assert {name: s.value for name, s in back.items()} == {
        name: value for name, value in file.items() if name != "engine"
    }
