"""Framings give the same payloads wherever the reads were cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.errors import TargetError
from lmi_bench.wire import framing
from lmi_bench.wire.framing import JsonLinesSplitter, SseSplitter


def read_in_pieces(splitter, stream, cuts):
    """Feed `stream` cut at the given places and return every payload."""
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    payloads = []
    for start, end in itertools.pairwise(edges):
        payloads += splitter.feed(stream[start:end])
    return payloads + splitter.close()


# (stream, payloads) by the WHATWG standard's own rules and examples
SSE_CASES = {
    "events": (b"data: {}\n\ndata: [DONE]\n\n", [b"{}", b"[DONE]"]),
    "at most one space is stripped": (b"data:a\n\ndata: b\n\ndata:  c\n\n", [b"a", b"b", b" c"]),
    "lines of one event join": (b"data: YHOO\ndata: +2\ndata: 10\n\n", [b"YHOO\n+2\n10"]),
    "comments are no events": (b": keep-alive\n\ndata: x\n: in between\n\n:\n\n", [b"x"]),
    "other fields carry no data": (b"event: add\nid: 1\nretry: 5\ndata: y\n\nevent: end\n\n", [b"y"]),
    "CR LF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "CR LF inside an event": (b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"]),
    "CR alone": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "an empty data line is an event": (b"data\n\ndata:\n\n", [b"", b""]),
    "a byte order mark opens": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "a split character": ("data: schön 日本\n\n".encode(), ["schön 日本".encode()]),
    "the last event without its blank line": (b"data: a\n\ndata: [DONE]", [b"a", b"[DONE]"]),
    "a line separator is no line end": ("data: a\u2028b\x0bc\n\n".encode(), ["a\u2028b\x0bc".encode()]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("case", SSE_CASES)
@given(cuts=st.lists(st.integers(min_value=0, max_value=200), max_size=12))
@settings(max_examples=30)
def test_sse_payloads_do_not_depend_on_the_cuts(case, cuts):
    stream, payloads = SSE_CASES[case]
    assert read_in_pieces(SseSplitter(), stream, cuts) == payloads


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=8), max_size=8
    ),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(min_value=0), max_size=20),
)
@settings(max_examples=150)
def test_sse_returns_any_text_whole(texts, line_end, cuts):
    stream = b"".join(b"data: " + text.encode() + line_end * 2 for text in texts)
    assert read_in_pieces(SseSplitter(), stream, cuts) == [text.encode() for text in texts]


LINE_CASES = {
    "lines": (b'{"a": 1}\n{"b": 2}\n', [b'{"a": 1}', b'{"b": 2}']),
    "blank lines are skipped": (b"a\n\n\nb\n\n\n", [b"a", b"b"]),
    "CR LF": (b"a\r\nb\r\n", [b"a", b"b"]),
    "the last line needs no newline": (b'{"a": 1}\n{"b": 2}', [b'{"a": 1}', b'{"b": 2}']),
    "a split character": ("日\n本\n".encode(), ["日".encode(), "本".encode()]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("case", LINE_CASES)
@given(cuts=st.lists(st.integers(min_value=0, max_value=60), max_size=12))
@settings(max_examples=30)
def test_json_lines_do_not_depend_on_the_cuts(case, cuts):
    stream, payloads = LINE_CASES[case]
    assert read_in_pieces(JsonLinesSplitter(), stream, cuts) == payloads


@pytest.mark.parametrize("splitter", [SseSplitter(), JsonLinesSplitter()], ids=["sse", "json lines"])
def test_a_frame_that_never_ends_is_refused_instead_of_kept(splitter, monkeypatch):
    monkeypatch.setattr(framing, "MAX_PAYLOAD_BYTES", 100)
    for _ in range(10):
        assert splitter.feed(b"data: 6789") == []
    with pytest.raises(TargetError, match="longer than 100 bytes") as caught:
        splitter.feed(b"!")
    assert caught.value.kind == "malformed_frame"


def test_data_lines_that_never_end_an_event_are_refused(monkeypatch):
    monkeypatch.setattr(framing, "MAX_PAYLOAD_BYTES", 100)
    splitter = SseSplitter()
    for _ in range(25):
        assert splitter.feed(b"data: 1234\n") == []
    with pytest.raises(TargetError, match="longer than 100 bytes"):
        splitter.feed(b"data: 5\n")
