"""InvokeEndpoint's own rules: one whole answer, and sixty seconds for it."""

import asyncio
import json

import boto3
import pytest
from botocore.exceptions import ClientError

INVOKE = "/endpoints/any/invocations"


def streamed(num_tokens):
    return {"prompt": [5, 6, 7], "max_tokens": num_tokens, "stream": True}


def test_a_stream_is_answered_whole_with_its_length(serve_toy, scripted):
    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            return await server.post(INVOKE, streamed(2))

    status, headers, body = asyncio.run(main())
    assert status == 200
    assert headers["Content-Length"] == str(len(body))
    assert headers["Content-Type"].startswith("text/event-stream")
    assert "x-Amzn-Invoked-Production-Variant" in headers
    *chunks, end, nothing = body.decode().split("\n\n")
    texts = [json.loads(chunk[len("data: ") :])["choices"][0]["text"] for chunk in chunks]
    assert (texts, end, nothing) == ([" t11", " t12"], "data: [DONE]", "")


def test_a_stream_that_takes_too_long_is_an_error_and_nothing_else(serve_toy, slow_steps):
    async def main():
        options = {"unary_timeout_s": 0.2}
        async with serve_toy(executor=slow_steps, app_options=options) as server:
            answer = await server.post(INVOKE, streamed(400))
            await server.until(lambda: server.scheduler.num_running == 0)
            return answer

    status, headers, body = asyncio.run(main())
    assert (status, headers["x-amzn-ErrorType"]) == (424, "ModelError")
    assert json.loads(body)["OriginalStatusCode"] == 0


def test_a_body_that_no_route_gets_is_an_error_as_boto3_knows_it(serve_toy):
    def invoke(url):
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        client = boto3.client("sagemaker-runtime", "us-east-1", endpoint_url=url, **keys)
        with pytest.raises(ClientError) as failed:
            client.invoke_endpoint(EndpointName="any", ContentType="application/json", Body=b"{" + b" " * 1000)
        return failed.value.response

    async def main():
        async with serve_toy(max_body_bytes=1000) as server:
            return await asyncio.to_thread(invoke, server.url)

    answer = asyncio.run(main())
    assert answer["Error"]["Code"] == "ValidationError"
    assert answer["Error"]["Message"].startswith("the body is too large")
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 413


@pytest.mark.parametrize("path", ["/invocations", "/predictions/toy"])
def test_a_container_is_asked_in_the_protocol_of_the_body(serve_toy, scripted, path):
    """djl-serving looks for `prompt`, then `inputs`, then `messages`."""
    messages = [{"role": "user", "content": "t1 t2"}]
    bodies = [
        {"prompt": "t1", "inputs": "t1", "max_tokens": 2},
        {"inputs": "t1", "messages": messages, "parameters": {"max_new_tokens": 2}},
        {"messages": messages, "max_tokens": 2},
    ]

    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            elsewhere = await server.post("/predictions/other", bodies[1])
            return [await server.post(path, body) for body in bodies], elsewhere

    answers, elsewhere = asyncio.run(main())
    assert [status for status, _, _ in answers] == [200] * 3
    completion, lmi, chat = (json.loads(body) for _, _, body in answers)
    assert completion["choices"][0]["text"] == lmi["generated_text"] == " t11 t12"
    assert chat["choices"][0]["message"]["content"] == " t11 t12"
    assert elsewhere[0] == 404
