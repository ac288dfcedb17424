"""AWS event streams: what botocore reads is what we write, and any cut of the bytes reads alike."""

import itertools
import json
import struct
import zlib

import pytest
from botocore.eventstream import EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.core.errors import TargetError
from lmi_bench.wire.framing import EitherSplitter
from lmi_bench.wire.sagemaker import EventStreamSplitter, StreamFailure, encode_frame, payload_part
from tests.wire.exception_frames import stream_exception

LINES = [
    json.dumps({"token": {"id": i, "text": text}}, ensure_ascii=False).encode()
    for i, text in enumerate(["Deep", " Läärning", " 是", ""])
]
BODY = b"".join(line + b"\n" for line in LINES)
EVENTS = b"".join(b"data: " + line + b"\n\n" for line in LINES)


def cut(data, places):
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def read(chunks):
    splitter = EventStreamSplitter(EitherSplitter())
    return [p for chunk in chunks for p in splitter.feed(chunk)] + splitter.close()


def test_a_frame_is_laid_out_as_the_format_says():
    """By hand: 12 bytes of prelude, one header of 1 + 2 + 1 + 2 + 1, 3 of payload, 4 of CRC."""
    frame = encode_frame({":a": "b"}, b"xyz")
    total, headers = struct.unpack("!II", frame[:8])
    assert (total, headers, len(frame)) == (26, 7, 26)
    assert frame[8:12] == struct.pack("!I", zlib.crc32(frame[:8]))
    assert frame[12:22] == b"\x02:a\x07\x00\x01bxyz"
    assert frame[22:] == struct.pack("!I", zlib.crc32(frame[:22]))


@given(st.binary(max_size=200))
def test_botocore_reads_our_payload_parts(data):
    buffer = EventStreamBuffer()
    buffer.add_data(payload_part(data))
    (message,) = list(buffer)
    assert message.payload == data
    assert message.headers[":event-type"] == "PayloadPart"


@given(
    body=st.sampled_from([BODY, EVENTS, BODY.rstrip(b"\n")]),
    parts=st.lists(st.integers(0, 10_000), max_size=8),
    reads=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_payloads_do_not_depend_on_the_cut_of_parts_and_reads(body, parts, reads):
    """A part may end inside a character, and a read inside a frame's prelude."""
    frames = b"".join(payload_part(part) for part in cut(body, parts))
    assert read(cut(frames, reads)) == LINES


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_one_wrong_bit_is_never_read_as_an_answer(place, bit):
    frames = bytearray(payload_part(BODY))
    frames[place % len(frames)] ^= 1 << bit
    with pytest.raises(TargetError) as caught:
        read([bytes(frames)])
    assert caught.value.kind in ("malformed_frame", "broken_stream")


@given(st.integers(1, 10_000))
def test_a_stream_that_ends_within_a_frame_is_broken(place):
    frame = payload_part(BODY)
    with pytest.raises(TargetError, match="into an event-stream frame") as caught:
        read([frame[: 1 + place % (len(frame) - 1)]])
    assert caught.value.kind == "broken_stream"


def test_an_exception_comes_after_the_good_parts_and_an_unfinished_line():
    payload = b'{"Message":"too slow","ErrorCode":"ModelInvocationTimeExceeded"}'
    found = read([payload_part(b'{"a":1}\n{"b"'), stream_exception("ModelStreamError", payload)])
    assert found == [b'{"a":1}', b'{"b"', payload]
    assert isinstance(found[2], StreamFailure)
    assert found[2].code == "ModelStreamError"


def test_an_error_frame_has_its_text_in_a_header():
    headers = {":message-type": "error", ":error-code": "Boom", ":error-message": "no luck"}
    (failure,) = read([encode_frame(headers, b"")])
    assert (failure.code, bytes(failure)) == ("Boom", b"no luck")


def test_other_events_carry_nothing():
    frame = encode_frame({":message-type": "event", ":event-type": "initial-response"}, b"x")
    assert read([frame, payload_part(BODY)]) == LINES


def test_headers_that_overrun_their_length_are_a_malformed_frame():
    """The CRCs are right, the header's own length is not."""
    block = b"\x02:a\x07\x00\xffb"
    prelude = struct.pack("!II", len(block) + 16, len(block))
    frame = prelude + struct.pack("!I", zlib.crc32(prelude)) + b"\x02:a\x63" + block[4:]
    with pytest.raises(TargetError) as caught:
        read([frame + struct.pack("!I", zlib.crc32(frame))])
    assert caught.value.kind == "malformed_frame"
