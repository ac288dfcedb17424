"""Text to ids and back, and streams that never show half a character."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.tokenizer import Tokenizer

TEXTS = ["plain words here", "naïve café", "日本語のテキスト", "🙂🙃 mixed 👩‍👩‍👧 end", "tab\tand\nline"]


def byte_level(folder):
    """As Llama 3 and GPT-2: every token is some bytes, a character may be three tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"Ġw": 256, "Ġwo": 257, "<|eos|>": 258}
    tokenizer = FastTokenizer(models.BPE(vocab, [("Ġ", "w"), ("Ġw", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def byte_fallback(folder):
    """As Llama 2: pieces with a mark for the space, bytes for whatever has no piece."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for char in "▁abcdefghijklmnopqrstuvwxyz":
        vocab[char] = len(vocab)
    tokenizer = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


def stream(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_stream_are_whole_characters_and_join_to_the_text(tokenizer, text):
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_characters="▁"), max_size=30))
def test_any_stream_joins_to_the_decoded_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=500)
@given(data=st.data())
def test_any_bytes_join_to_the_decoded_whole(byte_level_with_more, data):
    """Also what is no UTF-8, tokens of half a character, special and added ones, and unknown ids."""
    tokenizer = byte_level_with_more
    high = [tokenizer.encode(text, add_special_tokens=False) for text in ("é日🙂", "\x80\ufffd\U00010000")]
    ids = st.integers(0, 265) | st.sampled_from([each for some in high for each in some])
    token_ids = data.draw(st.lists(ids, max_size=30))
    for special in (False, True):
        detokenizer = tokenizer.detokenizer(special=special)
        pieces = [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=not special)


@pytest.fixture(scope="module")
def byte_level_with_more(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = FastTokenizer.from_file(str(byte_level(folder).folder / "tokenizer.json"))
    fast.add_special_tokens(["<end of it>", "<｜end｜>"])
    fast.add_tokens(["plain words", "é"])
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


class Counting(Tokenizer):
    """Counts the ids that it decodes."""

    num_decoded = 0

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("part", [b"\x80", b"\xe6", b"\xf0\x9f\x99", b"\x80\xf0\x9f\x99\x82", b"\xef\xbf\xbd"])
def test_bytes_that_never_become_a_character_are_not_decoded_again_and_again(tokenizer, part):
    counting = Counting.from_folder(tokenizer.folder)
    token_of = {tokenizer.token_bytes(i): i for i in range(259) if len(tokenizer.token_bytes(i)) == 1}
    ids = [token_of[bytes([byte])] for byte in part] * 400 + counting.encode("a")
    text = "".join(stream(counting, ids))
    assert text == counting.decode(ids)
    assert counting.num_decoded < 20 * len(ids)


def test_a_space_behind_a_special_token_is_kept(tmp_path):
    """An end token that is ignored shows nothing, and the words round it stay two words."""
    tokenizer = byte_fallback(tmp_path)
    words = [tokenizer.encode(word, add_special_tokens=False) for word in ("one", "two")]
    pieces = stream(tokenizer, [*words[0], 2, 2, *words[1]])
    assert "".join(pieces) == "one two"


@pytest.mark.parametrize("text", ["one two", "日本 語", "a  b"])
def test_a_stream_goes_on_from_the_prompt(tokenizer, text):
    """Prompt and pieces joined are the text, wherever it was cut into prompt and stream."""
    ids = tokenizer.encode(text)
    for cut in range(2, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if "�" in prompt:
            continue
        detokenizer = tokenizer.detokenizer(ids[:cut])
        pieces = [*(detokenizer.push([i]) for i in ids[cut:]), detokenizer.finish()]
        assert prompt + "".join(pieces) == text


def test_half_a_surrogate_pair_is_no_failure(tokenizer):
    assert tokenizer.decode(tokenizer.encode(json.loads(r'"a\ud800b"'))) == "a?b"


def test_a_character_appears_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("a日", add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert pieces[-4:] == ["", "", "日", ""]


def test_several_tokens_of_one_step_may_be_pushed_at_once(tokenizer):
    ids = tokenizer.encode("two words 🙂")
    detokenizer = tokenizer.detokenizer()
    assert "".join([detokenizer.push(ids[:5]), detokenizer.push(ids[5:])]) == "two words 🙂"


def test_a_stream_cut_in_a_character_says_so_at_its_end(tokenizer):
    ids = tokenizer.encode("ab🙂")[:-1]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces[:-1]) == "ab"
    assert set(pieces[-1]) == {"�"}


def test_special_tokens_are_kept_out_unless_wanted(tmp_path):
    tokenizer = byte_fallback(tmp_path)
    ids = tokenizer.encode("hi")
    assert ids[0] == 1
    assert tokenizer.encode("hi", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")


def test_what_training_left_in_the_file_neither_cuts_nor_fills_a_prompt(tmp_path):
    """transformers resets both before each call as well."""
    byte_level(tmp_path)
    trained = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    trained.enable_truncation(4)
    trained.enable_padding(length=12)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert [len(tokenizer.encode("x" * count)) for count in (2, 9)] == [2, 9]


def test_the_vocabulary_counts_added_tokens(tmp_path):
    assert byte_level(tmp_path).vocab_size == 259


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, (7,)),
        ({}, {"eos_token_id": 9}, (9,)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {"eos_token_id": None}, ()),
        (None, {"text_config": {"eos_token_id": 2}}, (2,)),
        ({}, {"eos_token_id": 9, "text_config": {"eos_token_id": 2}}, (9,)),
        (None, None, ()),
    ],
)
def test_end_ids_come_from_the_generation_settings_first(tmp_path, generation, config, expected):
    byte_level(tmp_path)
    for name, content in (("generation_config", generation), ("config", config)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == expected


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match=r"has no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_panic_of_the_library_is_one_error_and_writes_no_lines_of_its_own(tmp_path, capfd):
    byte_fallback(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"tokenizer.json cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    print("still written", file=sys.stderr)
    assert capfd.readouterr().err == "still written\n"


def test_a_text_without_tokens_is_the_senders_error():
    fast = FastTokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(InputError, match=r"cannot encode the text: .*UNK"):
        Tokenizer(fast).encode("b")


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    byte_level(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'lmi-bench\[engine\]'"):
        Tokenizer.from_folder(tmp_path)


def test_reading_a_tokenizer_loads_no_torch(tmp_path):
    byte_level(tmp_path)
    code = (
        "import sys, pathlib; from lmi_bench.engine.tokenizer import Tokenizer; "
        f"Tokenizer.from_folder(pathlib.Path({str(tmp_path)!r})); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_tokens_make_up_characters(tmp_path, make):
    tokenizer = make(tmp_path)
    for text in ("🙂", "日本", "é", "".join(map(chr, range(0x80, 0x180)))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = [tokenizer.token_bytes(token_id) for token_id in ids]
        assert b"".join(parts).decode().strip() == text
        assert sum(len(part) == 1 for part in parts) >= 2


def test_the_text_of_a_token_is_what_it_adds(tmp_path):
    """Llama 2's decoder strips the first space of a text, and not those of its words."""
    (tmp_path / "a").mkdir()
    tokenizer = byte_fallback(tmp_path / "a")
    ids = tokenizer.encode("a b c", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)) == " a b c"
    assert [tokenizer.token_text(i) for i in (1, 2, 3 + 0xE6)] == ["<s>", "</s>", "\N{REPLACEMENT CHARACTER}"]
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("a wo b", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)) == "a wo b"
    assert (tokenizer.token_text(258), tokenizer.token_bytes(258)) == ("<|eos|>", b"<|eos|>")


def test_sampling_settings_are_the_models_own_where_it_has_any(tmp_path):
    assert byte_level(tmp_path).sampling == {}
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": None,
        "do_sample": True,
        "eos_token_id": 2,
        "max_new_tokens": 2048,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    found = byte_level(tmp_path)
    assert found.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert found.max_new_tokens == 2048


@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_no_text_has_more_bytes_than_its_tokens_can_stand_for(tokenizer, text):
    longest = tokenizer.longest_token_bytes
    sent = text.encode("utf-8", "replace")
    if longest is not None:
        assert len(sent) <= longest * len(tokenizer.encode(text))


def test_a_token_stands_for_text_of_any_length_where_words_are_dropped_or_unknown(tmp_path):
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    def longest(change):
        vocab = {name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        fast = Fast(models.BPE(vocab | {"abcd": 256}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        change(fast)
        return Tokenizer(fast).longest_token_bytes

    split = pre_tokenizers.Split(Regex(" "), "removed")
    words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    assert longest(lambda fast: None) == 4
    assert longest(lambda fast: fast.add_special_tokens(["<end of all>"])) == 12
    assert longest(lambda fast: setattr(fast, "normalizer", normalizers.NFC())) == 12
    for change in (
        lambda fast: setattr(fast, "pre_tokenizer", words),
        lambda fast: setattr(fast, "normalizer", normalizers.Strip()),
        lambda fast: setattr(fast, "normalizer", normalizers.Replace("aa", "a")),
        lambda fast: setattr(fast, "model", models.BPE({"a": 0}, [])),
        lambda fast: setattr(fast, "model", models.WordLevel({"?": 0}, unk_token="?")),
        lambda fast: fast.add_tokens([AddedToken("<mask>", lstrip=True)]),
    ):
        assert longest(change) is None


def test_a_text_of_more_ids_than_are_wanted_is_refused(tokenizer):
    ids = tokenizer.encode("one two three")
    assert tokenizer.encode("one two three", most=len(ids)) == ids
    with pytest.raises(CapacityError, match=f"{len(ids)} tokens, more than {len(ids) - 1}"):
        tokenizer.encode("one two three", most=len(ids) - 1)
