"""OpenAI's embeddings API, as its reference writes it."""

import json

import pytest

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.format import WireEvent, find_format

EMBEDDINGS = find_format("embeddings")


def test_one_text_is_sent_without_a_length():
    request = PlannedRequest(0, 0.0, 3, 20, prompt_text="To be", prompt_token_ids=(1, 2, 3))
    body = json.loads(EMBEDDINGS.request_body(request, model="bge"))
    assert body == {"model": "bge", "input": "To be"}
    with pytest.raises(InputError, match="no prompt_text"):
        EMBEDDINGS.request_body(PlannedRequest(0, 0.0, 3, 20), model="bge")


@pytest.mark.parametrize("vector", [[0.1, -0.2], "zczMPc3MTL4="])
def test_a_vector_is_a_whole_answer_without_tokens(vector):
    """As numbers, or as base64."""
    body = {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector}],
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }
    found = EMBEDDINGS.parse(json.dumps(body).encode())
    assert found == WireEvent(input_tokens=8, output_tokens=0, tokenless=True, end=True)
    assert found.num_tokens == 0


def test_an_error_object_is_an_error():
    found = EMBEDDINGS.parse(b'{"error": {"message": "too long", "code": 400}}')
    assert found == WireEvent(error="too long", error_kind="client_error", end=True)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"data": []},
        {"data": [{"embedding": []}]},
        {"data": [{"embedding": None}]},
        {"data": ["x"]},
        {"data": 3},
        {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 1.5}},
        {"data": [{"embedding": [0.1]}], "usage": 3},
    ],
)
def test_a_reply_without_a_vector_is_a_malformed_frame(body):
    with pytest.raises(TargetError) as caught:
        EMBEDDINGS.parse(json.dumps(body).encode())
    assert caught.value.kind == "malformed_frame"
