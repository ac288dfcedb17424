"""Prompts: exact lengths, one sequence a seed, another text a run."""

from __future__ import annotations

from collections import Counter

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.prompts.prompts import (
    DatasetPrompts,
    ExactText,
    Lengths,
    SyntheticPrompts,
    TokenIds,
    common_words,
    load_dataset,
    no_text,
)

LEVEL = LevelSpec(0, Load(concurrency=1), num_requests=1)


class PairTokenizer:
    """Lower-case letters; `ab` is one token of its own, so text does not always keep its ids."""

    vocab_size = 27

    def encode(self, text):
        ids, place = [], 0
        while place < len(text):
            if text.startswith("ab", place):
                ids.append(26)
                place += 2
            else:
                ids.append(ord(text[place]) - 97)
                place += 1
        return ids

    def decode(self, ids):
        return "".join("ab" if i == 26 else chr(97 + i) for i in ids)


class Unstable:
    """Every text is one token: no prompt of two can exist."""

    vocab_size = 4

    def encode(self, text):
        return [0]

    def decode(self, ids):
        return "x" * len(ids)


@pytest.mark.parametrize("length", [1, 2, 17, 500])
def test_a_prompt_has_exactly_the_asked_tokens(length):
    prompts = SyntheticPrompts([Lengths(length, 4)], ExactText(PairTokenizer()), seed=1)
    for number in range(5):
        request = prompts.request(LEVEL, number)
        assert len(PairTokenizer().encode(request.prompt_text)) == length
        assert list(request.prompt_token_ids) == PairTokenizer().encode(request.prompt_text)


def test_a_begin_of_text_token_counts_as_the_server_counts_it():
    class WithBegin(PairTokenizer):
        def encode(self, text):
            return [99, *super().encode(text)]

    request = SyntheticPrompts([Lengths(9, 4)], ExactText(WithBegin()), seed=1).request(LEVEL, 0)
    assert len(WithBegin().encode(request.prompt_text)) == 9
    assert request.prompt_token_ids[0] == 99


def test_a_tokenizer_without_stable_words_is_refused():
    with pytest.raises(InputError, match="use a data set"):
        ExactText(Unstable())


def test_ids_stay_in_the_vocabulary_and_skip_special_ones():
    prompts = SyntheticPrompts([Lengths(500, 4)], TokenIds(8, first_id=3), seed=1)
    assert set(prompts.request(LEVEL, 0).prompt_token_ids) == {3, 4, 5, 6, 7}


def test_one_seed_and_salt_give_one_prompt_and_another_salt_another():
    def text(**options):
        source = SyntheticPrompts([Lengths(32, 4)], common_words, **options)
        return source.request(LEVEL, 0).prompt_text

    assert text(seed=1, salt="a") == text(seed=1, salt="a")
    assert text(seed=1, salt="a") != text(seed=1, salt="b")
    assert text(seed=1, salt="a") != text(seed=2, salt="a")


def test_no_two_requests_of_a_run_share_a_prefix():
    source = SyntheticPrompts([Lengths(64, 4)], common_words, seed=1)
    levels = [LevelSpec(i, Load(concurrency=1), num_requests=1) for i in range(4)]
    starts = {
        " ".join(source.request(level, number).prompt_text.split()[:8]) for level in levels for number in range(-2, 20)
    }
    assert len(starts) == 4 * 22


def test_a_mix_keeps_its_shares_in_every_stretch():
    """Shares 1:3, so every block of four holds one of the first kind."""
    source = SyntheticPrompts([Lengths(20, 500, 0.25), Lengths(500, 20, 0.75)], no_text, seed=1)
    kinds = [source.request(LEVEL, number).input_tokens for number in range(400)]
    for start in range(0, 400, 4):
        assert Counter(kinds[start : start + 4]) == {20: 1, 500: 3}
    assert len({tuple(kinds[start : start + 4]) for start in range(0, 400, 4)}) > 1


LOGGED = (
    0.125,
    0.1,
    0.025,
    0.125,
    0.1,
    0.025,
    0.125,
    0.1,
    0.025,
    0.075,
    0.06,
    0.015,
    0.045,
    0.036,
    0.009,
    0.005,
    0.004,
    0.001,
)


def test_the_shares_of_a_log_are_kept_within_a_thousand_requests():
    """What `workload from` writes: their common measure made a block of millions of requests."""
    kinds = [Lengths(20 + index, 10, share) for index, share in enumerate(LOGGED)]
    source = SyntheticPrompts(kinds, no_text, seed=1)
    asked = Counter(source.request(LEVEL, number).input_tokens for number in range(1000))
    assert [asked[20 + index] for index in range(18)] == [round(1000 * each) for each in LOGGED]


def test_lengths_are_the_same_in_every_level_and_run():
    def lengths(level, salt):
        source = SyntheticPrompts([Lengths(20, 500), Lengths(500, 20)], no_text, seed=1, salt=salt)
        return [source.request(level, number).output_tokens for number in range(20)]

    other = LevelSpec(3, Load(concurrency=4), num_requests=9)
    assert lengths(LEVEL, "a") == lengths(other, "b")


def test_a_data_set_gives_its_own_prompts_and_lengths(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "abc", "output_tokens": 7}\n\n{"text": "hello"}\n', encoding="utf-8")
    source = DatasetPrompts(load_dataset(path), output_tokens=5, tokenizer=PairTokenizer(), seed=0)
    requests = [source.request(LEVEL, number) for number in range(4)]
    assert {(r.prompt_text, r.output_tokens, r.input_tokens) for r in requests} == {
        ("abc", 7, 2),  # `ab` and `c`
        ("hello", 5, 5),
    }
    assert requests[0].prompt_text == requests[2].prompt_text


def test_a_salt_goes_before_a_data_sets_prompt(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    source = DatasetPrompts(load_dataset(path), output_tokens=5, tokenizer=None, seed=0, salt="r1")
    first, second = (source.request(LEVEL, number).prompt_text for number in range(2))
    assert first.endswith("hello")
    assert first != second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompt"),
        ("{}\n", "entry 1 needs a `prompt`"),
        ('{"prompt": "a"}\nnot json\n', "line 2 of .*data.jsonl is neither JSON lines nor JSON"),
        ('{"prompt": "a", "output_tokens": 0}\n', "at least 1, got 0"),
    ],
)
def test_a_data_set_that_cannot_be_used_names_the_line(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_dataset(path)
