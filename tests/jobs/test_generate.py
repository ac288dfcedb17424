"""Files of questions with their answers."""

from __future__ import annotations

import json

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.jobs.generate import LabelledPrompt, read_questions


def test_each_line_is_a_question(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": "4"}\n\n')
    assert read_questions(path) == [LabelledPrompt("2 + 2 =", ("3", "4"), 1)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"choices": "34"}, "entry 2: expected"),
        ({"choices": [3, 4]}, "entry 2: expected"),
        ({"prompt": ""}, "entry 2: expected"),
        ({"choices": ["4"]}, "entry 2: the answer '4' is not one of two or more choices"),
        ({"answer": "5"}, "entry 2: the answer '5' is not one of two or more choices"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, changed, said):
    path = tmp_path / "questions.jsonl"
    right = {"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": "4"}
    path.write_text(f"{json.dumps(right)}\n{json.dumps(right | changed)}\n")
    with pytest.raises(InputError, match=said):
        read_questions(path)
