"""The stand-in tokenizer keeps counts; stop strings do not depend on where tokens end."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.server.codec import PlainTokenizer, StopStringFilter


@given(st.lists(st.integers(min_value=0, max_value=31_999), max_size=40))
def test_ids_survive_text_and_back(token_ids):
    tokenizer = PlainTokenizer()
    text = tokenizer.decode(token_ids)
    assert text.isascii()
    assert tokenizer.encode(text) == token_ids
    decoder = tokenizer.detokenizer()
    assert "".join(decoder.push([i]) for i in token_ids) + decoder.finish() == text


@given(st.text(max_size=60), st.integers(min_value=1, max_value=50))
def test_a_word_is_a_token_whatever_it_is(text, vocab_size):
    token_ids = PlainTokenizer(vocab_size).encode(text)
    assert len(token_ids) == len(text.split())
    assert all(0 <= token_id < vocab_size for token_id in token_ids)


def test_more_words_than_are_wanted_are_refused():
    assert len(PlainTokenizer().encode("a b c", most=3)) == 3
    with pytest.raises(CapacityError, match="more than 2 tokens"):
        PlainTokenizer().encode("a b c", most=2)


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(InputError, match="vocab_size must be at least 1, got 0"):
        PlainTokenizer(0)


def cut_at_first_stop(text, stops):
    """What a reader of one character at a time shows: the definition, in the plainest way."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=500)
def test_stop_strings_cut_the_same_wherever_the_pieces_end(pieces, stops):
    stop_filter = StopStringFilter(tuple(stops))
    shown = ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        if stop_filter.matched:
            break
    else:
        shown += stop_filter.flush()
    assert (shown, stop_filter.matched) == cut_at_first_stop("".join(pieces), stops)


@given(text=st.text("abc", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stops):
    stop_filter = StopStringFilter(tuple(stops))
    shown = ""
    for character in text:
        shown += stop_filter.push(character)
        if stop_filter.matched:
            return
    held = text[len(shown) :]
    starts = {stop[:n] for stop in stops for n in range(len(stop))}
    longest = max((text[i:] for i in range(len(text) + 1) if text[i:] in starts), key=len)
    assert held == longest


@given(text=st.text("abc", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300)
def test_where_the_stop_string_is_part_of_the_answer_nothing_is_held(text, stops):
    stop_filter = StopStringFilter(tuple(stops), keep=True)
    shown, expected = "", cut_at_first_stop(text, stops)
    for number, character in enumerate(text, start=1):
        shown += stop_filter.push(character)
        assert shown == text[:number]
        if stop_filter.matched:
            break
    assert (shown + stop_filter.flush(), stop_filter.matched) == (expected[0] + (expected[1] or ""), expected[1])


def test_without_stop_strings_nothing_is_held():
    stop_filter = StopStringFilter(())
    assert "".join(map(stop_filter.push, itertools.repeat("ab", 3))) == "ababab"
    assert stop_filter.flush() == ""
