"""`generate` on the demo model: its text means nothing, its figures have to be right."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmi_bench.analysis.results.confidence import confidence
from lmi_bench.core.engine_fields import ModelFields
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Stated
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.engine.torch_backend.demo_vocabulary import EOS_TOKEN_ID, VOCAB_SIZE, demo_tokenizer_json
from lmi_bench.jobs.generate import continuation_ids
from lmi_bench.jobs.generate import generate as generate_text
from lmi_bench.jobs.settings.bundled import GenerateSettings
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.parts import close_all
from tests.end_to_end.commands import command, environment, lmi_bench

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
    request over all of it. A least number of tokens is the whole text's."""
    args = ("-m", short_model, "-p", "one two three four", "--ignore-eos", "--draft", "ngram")
    asked = ("--max-new-tokens", "25", "--min-tokens", "25", "--until-done", "--confidence")
    chained = generate(*args, *asked)
    totals = re.search(r"(\d+) tokens in (\d+) requests .* ended by (\w+)", chained.stderr)
    assert totals.groups() == ("60", "3", "context_full")
    whole = generate(*args, "--max-new-tokens", "60")
    assert chained.stdout == whole.stdout
    assert "60 tokens in 1 request and" in whole.stderr
    score = float(re.search(r"confidence ([\d.]+) = exp", chained.stderr).group(1))
    assert 0 < score < 1


def test_each_token_is_printed_with_the_likeliest_ones_and_may_end_the_text(short_model):
    """Greedy: the chosen token is the first of the likeliest. Its id then ends the text, but not
    before the least number of tokens."""
    args = ("-m", short_model, "-p", "one two three four", "--ignore-eos")
    whole = generate(*args, "--max-new-tokens", "5", "--logprobs", "2")
    lines = re.findall(r"^('.*?') (-[\d.]+); likeliest (.+)$", whole.stderr, re.MULTILINE)
    assert len(lines) == 5
    for token, logprob, likeliest in lines:
        assert likeliest.startswith(f"{token} {logprob}, ")
    ids = Tokenizer.from_folder(short_model).encode(whole.stdout.removesuffix("\n"))
    ends = ("--max-new-tokens", "5", "--stop-token-id", str(ids[0]))
    cut = generate(*args, *ends)
    assert "1 tokens in 1 request" in cut.stderr
    assert "ended by a stop token" in cut.stderr
    longer = generate(*args, *ends, "--min-tokens", "3")
    assert int(re.search(r"(\d+) tokens in", longer.stderr).group(1)) >= 3


def test_a_program_gets_the_text_in_pieces_and_as_a_whole_and_nothing_is_printed(short_model, capsys):
    """As many scores as tokens; the pieces come one by one."""
    options = Stated(ModelFields, values={"dtype": "float32", "threads": 1})
    settings = GenerateSettings(
        model=str(short_model),
        prompt="one two three four",
        sampling=SamplingParams(max_new_tokens=5, ignore_eos=True),
        confidence=True,
        model_options=options,
    )
    pieces = []
    done = generate_text(settings, on_text=pieces.append)
    assert "".join(pieces) == done.text
    assert sum(map(bool, pieces)) > 1
    assert (done.tokens, done.requests, len(done.scores)) == (5, 1, 5)
    assert done.finish_reason == "length"
    assert capsys.readouterr() == ("", "")


def test_a_text_that_fills_the_context_says_so_and_an_empty_stop_is_refused(short_model):
    args = ("-m", short_model, "-p", "one two three four", "--ignore-eos")
    assert "fill the model's context of 64 tokens" in generate(*args).stderr
    assert "--stop ''" in generate(*args, "--stop", "", expect=2).stderr


def test_the_end_is_explained_and_another_than_expected_is_a_failure(short_model):
    """The whole text first; a stop text across the border of two requests ends the chain."""
    args = ("-m", short_model, "-p", "one two three four", "--ignore-eos")
    whole = generate(*args, "--max-new-tokens", "24", "--expect-end", "eos_token", expect=1)
    assert "cut off: the limit of --max-new-tokens 24 was reached" in whole.stderr
    assert "expected: eos_token (--expect-end)" in whole.stderr
    text = whole.stdout.removesuffix("\n")
    words = text.split(" ")
    stop = " ".join(words[5:9])  # a word a token: a border every 2 tokens cuts it
    cut = generate(
        *(*args, "--max-new-tokens", "2", "--until-done", "--stop", stop), *("--expect-end", "stop_sequence")
    )
    assert cut.stdout == text[: text.index(stop)] + "\n"
    assert f"ended by the stop text {stop!r}, not by the model" in cut.stderr


def test_answers_are_held_against_the_truth(short_model, tmp_path):
    """Two questions whose answers are equal texts in other order: one is right, one wrong, by
    whatever the model holds likelier; both fall into the row of the same share."""
    ranked = generate("-m", short_model, "-p", "is it", "--choices", " yes", "--choices", " no")
    share = re.search(r"[\d.]+%", ranked.stdout)[0]  # of the first row, the likeliest
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"prompt": "is it", "choices": [" yes", " no"], "answer": answer}) + "\n"
            for answer in (" yes", " no")
        )
    )
    done = generate("-m", short_model, "--questions", questions)
    assert f"1 of 2 right (50.0%), mean share {share}" in done.stdout


def test_choices_are_ranked_by_joint_log_probability(short_model):
    done = generate("-m", short_model, "-p", "is it", "--choices", " yes no yes no", "--choices", " yes")
    rows = re.findall(r"^ ?(yes.*?)\s+(\d+)\s+(-[\d.]+)\s+([\d.]+)", done.stdout, re.MULTILINE)
    assert sum(map(float, re.findall(r"([\d.]+)%", done.stdout))) == pytest.approx(100, abs=0.11)
    assert [row[0].strip() for row in rows] == ["yes", "yes no yes no"]
    joints = [float(row[2]) for row in rows]
    assert joints == sorted(joints, reverse=True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-p", "a", "--choices", "yes"), "needs at least two answers"),
        (("-p", ""), "the prompt is empty"),
        (("-p", "a", "--expect-end", "eos"), "--expect-end eos: use eos_token, stop_sequence"),
        (("--questions", "no-such-file"), "cannot read no-such-file"),
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


def test_a_budget_of_tokens_takes_no_more_memory_than_it_needs(short_model):
    """128 tokens of 2 heads of 16 values in float32, keys and values: 32,768 bytes."""
    budget = EngineSection(backend="torch", dtype="float32", max_batch_total_tokens=128)
    parts = open_torch_engine(str(short_model), budget)
    asyncio.run(close_all(parts.executors))
    assert parts.facts["kv_cache_bytes"] == 128 * 2 * 16 * 4 * 2
    assert parts.config.cache_tokens == 128


def test_standard_input_that_is_no_text_is_one_line():
    done = subprocess.run(
        command("generate", "--model", "demo-15m", "--prompt", "-"),
        input=b"ab\xff\xfe",
        env=environment() | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
    )
    assert (done.returncode, b"standard input: it is not UTF-8" in done.stderr) == (2, True)
