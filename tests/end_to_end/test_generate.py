"""`generate` on the demo model: its text means nothing, its figures have to be right."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmi_bench.cli.generate_run import confidence, continuation_ids, why_cut
from lmi_bench.engine.torch_backend.demo_vocabulary import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    demo_tokenizer_json,
)
from lmi_bench.errors import InputError
from tests.end_to_end.commands import lmi_bench

ONE_THREAD = ("--threads", "1", "--dtype", "float32")


def generate(*args, expect=0):
    return lmi_bench("generate", *ONE_THREAD, *args, expect=expect)


@pytest.fixture(scope="module")
def short_model(tmp_path_factory):
    """A tiny Llama whose context is 64 tokens, with the demo models' words."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("short")
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(demo_tokenizer_json(), encoding="utf-8")
    return folder


def test_chained_requests_go_on_where_the_one_before_ended(short_model):
    """4 tokens of prompt leave 60: three requests of 25, the last one less, give the text of one
    request over all of it."""
    args = ("-m", short_model, "-p", "one two three four", "--ignore-eos", "--draft", "ngram")
    chained = generate(*args, "--max-new-tokens", "25", "--until-done", "--confidence")
    totals = re.search(r"(\d+) tokens in (\d+) requests .* ended by (\w+)", chained.stderr)
    assert totals.groups() == ("60", "3", "context_full")
    whole = generate(*args, "--max-new-tokens", "60")
    assert chained.stdout == whole.stdout
    assert "60 tokens in 1 request and" in whole.stderr
    score = float(re.search(r"confidence ([\d.]+) = exp", chained.stderr).group(1))
    assert 0 < score < 1


def test_choices_are_ranked_by_joint_log_probability(short_model):
    done = generate(
        "-m", short_model, "-p", "is it", "--choices", " yes no yes no", "--choices", " yes"
    )
    rows = re.findall(r"^ ?(yes.*?)\s+(\d+)\s+(-[\d.]+)\s+([\d.]+)", done.stdout, re.MULTILINE)
    assert [row[0].strip() for row in rows] == ["yes", "yes no yes no"]
    joints = [float(row[2]) for row in rows]
    assert joints == sorted(joints, reverse=True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-p", "a", "--choices", "yes"), "needs at least two answers"),
        (("-p", ""), "the prompt is empty"),
        (("-p", "a", "--draft", "no-such-model"), "'no-such-model' is neither a folder nor a demo"),
    ],
)
def test_what_cannot_be_generated_is_one_line(args, message):
    done = generate(*args, expect=2)
    assert message in done.stderr


def test_confidence_is_the_geometric_mean_of_the_probabilities():
    """(0.5 * 0.25 * 0.125) ** (1 / 3) = 0.25."""
    assert confidence([math.log(0.5), math.log(0.25), math.log(0.125)]) == pytest.approx(0.25)


class WholeWords:
    """Merges "ab" into one token, so that a choice can change its prompt's last token."""

    def encode(self, text, *, add_special_tokens=True):
        ids = {"a": 1, "b": 2, "ab": 3, " ": 4}
        return [0] * add_special_tokens + [ids[piece] for piece in re.findall("ab|a|b| ", text)]


def test_a_choice_has_the_tokens_that_it_adds_to_the_prompt():
    assert continuation_ids(WholeWords(), "b", [0, 2], " ab") == [4, 3]


def test_a_choice_that_would_merge_into_the_prompt_stands_alone():
    assert continuation_ids(WholeWords(), "a", [0, 1], "b") == [2]


def test_a_choice_without_a_token_is_refused():
    with pytest.raises(InputError, match="has no token"):
        continuation_ids(WholeWords(), "a", [0, 1], "")


def test_the_right_answers_are_set_against_the_confidence(short_model, tmp_path):
    """Two cases with one question and opposite answers: one of two is right, whatever it thinks."""
    cases = tmp_path / "cases.jsonl"
    case = {"prompt": "is it", "choices": [" yes", " no"]}
    cases.write_text(
        json.dumps({**case, "answer": " yes"}) + "\n" + json.dumps({**case, "answer": 1}) + "\n"
    )
    done = generate("-m", short_model, "--calibrate", cases)
    assert "1 of 2 right; expected calibration error" in done.stdout
    (row,) = re.findall(r"([\d.]+) to [\d.]+\s+2\s+([\d.]+) %\s+50 %", done.stdout)
    assert 50 <= float(row[1]) <= 100
    cases.write_text('{"prompt": "a", "choices": [" b"], "answer": 0}')
    assert "line 1" in generate("-m", short_model, "--calibrate", cases, expect=2).stderr


def test_a_cut_text_is_told_by_exit_code_and_reason():
    cut = generate("-p", "a", "--max-new-tokens", "2", "--ignore-eos", "--require-end", expect=1)
    assert "raise it, or ask on with --until-done" in cut.stderr


def test_each_reason_has_its_advice():
    assert why_cut("eos_token") is None
    assert "--stop" in why_cut("stop_sequence")
    assert "context" in why_cut("context_full")
