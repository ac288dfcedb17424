"""Texts from files, as a user writes them."""

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.engine.texts import CALIBRATION, EVALUATION, read_text


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", "as it is", "as it is"),
        ("a.jsonl", '{"text": "one"}\n\n{"prompt": "two"}\n', "one\n\ntwo"),
        ("a.json", '[{"text": "one"}, {"text": "two"}]', "one\n\ntwo"),
    ],
)
def test_a_files_texts_are_joined(tmp_path, name, content, text):
    (tmp_path / name).write_text(content)
    assert read_text(tmp_path / name, CALIBRATION) == text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "one"}\n{"words": 1}\n', "entry 2 needs a `text` or `prompt`"),
        ("a.jsonl", '{"text": "one"}\n{"text"', "line 2 of .*a.jsonl is neither JSON lines"),
        ("a.json", "[3]", "entry 1 needs"),
        ("a.txt", " \n", "contains no text"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=said):
        read_text(tmp_path / name, CALIBRATION)


def test_the_samples_parts_differ():
    assert read_text(None, CALIBRATION) != read_text(None, EVALUATION)
