"""A model.py changes what comes in and what goes out, and its faults stay with their request."""

import asyncio
import json

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.engine.server.formatters import load_formatters
from lmi_bench.engine.server.lmi_routes import Replies

QUESTION = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
def read(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
    count = len(tokenizer.encode(decoded_payload["question"]))
    return {"inputs": decoded_payload["question"], "stream": decoded_payload.get("stream", False),
            "parameters": {"max_new_tokens": count}}

@output_formatter
def write(response_data: dict) -> dict:
    return {"said": response_data.get("generated_text"), "by": "model.py"}
"""


def load(tmp_path, text):
    path = tmp_path / "model.py"
    path.write_text(text)
    return load_formatters(path)


def post(serve_toy, formatters, body):
    async def main():
        async with serve_toy(app_options={"replies": Replies(formatters=formatters)}) as server:
            status, _, data = await server.post("/invocations", body)
            await server.until(lambda: server.engine.stats().used_blocks == 0)
            return status, [json.loads(line) for line in data.splitlines()]

    return asyncio.run(main())


def test_a_body_of_the_users_own_shape_is_read_and_the_reply_is_theirs(serve_toy, tmp_path):
    formatters = load(tmp_path, QUESTION)
    status, [reply] = post(serve_toy, formatters, {"question": "a b c"})
    assert status == 200
    assert reply["by"] == "model.py"
    assert len(reply["said"].split()) == 3


def test_every_line_of_a_stream_passes_the_output_formatter(serve_toy, tmp_path):
    formatters = load(tmp_path, QUESTION)
    status, lines = post(serve_toy, formatters, {"question": "a b c", "stream": True})
    assert status == 200
    assert [line["by"] for line in lines] == ["model.py"] * 3
    assert [line["said"] is None for line in lines] == [True, True, False]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return response_data['missing']", "KeyError: 'missing'"),
        ("return 'text'", "returned str; it must return a dict"),
        ("return {'set': {1}}", "not JSON"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_formatter_is_answered_424_as_a_container_does(serve_toy, tmp_path, body, says, stream):
    formatters = load(
        tmp_path,
        "from djl_python.output_formatter import output_formatter\n"
        f"@output_formatter\ndef write(response_data):\n    {body}\n",
    )
    status, [reply] = post(serve_toy, formatters, {"inputs": "a", "stream": stream})
    assert (status, reply["code"]) == (424, 424)
    assert says in reply["error"]


def test_a_formatter_that_fails_in_mid_stream_ends_it_with_an_error_line(serve_toy, tmp_path):
    formatters = load(
        tmp_path,
        "from djl_python.output_formatter import output_formatter\n"
        "@output_formatter\ndef write(response_data):\n"
        "    assert 'generated_text' not in response_data, 'no end'\n    return response_data\n",
    )
    body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 3}}
    status, lines = post(serve_toy, formatters, body)
    assert status == 200
    assert ["token" in line for line in lines] == [True, True, False]
    assert lines[-1]["code"] == 424
    assert "no end" in lines[-1]["error"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "has no formatter"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("from djl_python.output_formatter import RequestOutput", "ImportError"),
        (QUESTION + QUESTION.split("@output")[0], "2 functions have @input_formatter"),
    ],
)
def test_a_file_without_one_formatter_of_a_kind_is_refused(tmp_path, text, says):
    with pytest.raises(InputError, match=says):
        load(tmp_path, text)
