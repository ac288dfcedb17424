"""A count that is none, or a word that is none, is of no protocol: the answer is malformed."""

import pytest

from lmi_bench.core.errors import TargetError
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.lmi import LmiFormat
from lmi_bench.wire.tgi import TgiFormat

STREAMED = b'{"token":{"id":2,"text":"a"},"generated_text":"a","details":%s}'
WHOLE = b'{"generated_text":"a","details":%s}'


@pytest.mark.parametrize("payload", [STREAMED, WHOLE])
@pytest.mark.parametrize("wire_format", [TgiFormat(), LmiFormat()])
@pytest.mark.parametrize(
    "details",
    [
        b'{"finish_reason":["x"],"generated_tokens":1}',
        b'{"finish_reason":7,"generated_tokens":1}',
        b'{"finish_reason":"length","generated_tokens":"x"}',
        b'{"finish_reason":"length","generated_tokens":-5}',
        b'{"finish_reason":"length","generated_tokens":2.5}',
        b'{"finish_reason":"length","generated_tokens":true}',
    ],
)
def test_a_wrong_count_or_word_is_a_malformed_frame(wire_format, payload, details):
    with pytest.raises(TargetError) as caught:
        wire_format.parse(payload % details)
    assert caught.value.kind == "malformed_frame"


def test_counts_that_are_counts_are_taken():
    event = WireEvent("a", token_count=0, input_tokens=3, output_tokens=2**20, finish_reason="")
    assert (event.num_tokens, event.output_tokens) == (0, 2**20)
