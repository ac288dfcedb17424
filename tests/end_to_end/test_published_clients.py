"""The clients and files of the posts on large language models on SageMaker, against `serve`.

boto3 is unmodified; files and clients are written anew after the posts' descriptions:

- "Boost inference performance for Mixtral and Llama 2 models with new Amazon SageMaker
  containers" (AWS Machine Learning Blog, 8 April 2024): serving.properties of LMI 0.26 with
  jsonlines, a class that reads lines from the event stream, scores and the reason of the end.
- "Benchmark and optimize endpoint deployment in Amazon SageMaker JumpStart" (29 January 2024):
  TGI's variables, `response[0]["details"]["generated_tokens"]`, threads with up to 20 attempts.
- "Improve throughput performance of Llama 2 models using Amazon SageMaker" and its batching
  tables (2023): Falcon-40B with dynamic, rolling and paged batching.
"""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from lmi_bench.core.errors import InputError
from lmi_bench.deploy.bundled_engine import bundled_settings
from lmi_bench.deploy.checks import NEWEST, container_for
from lmi_bench.deploy.option_table import Setting
from lmi_bench.deploy.properties import read_properties
from lmi_bench.jobs.serving_file import read_serving_file
from tests.end_to_end.commands import Server
from tests.loadgen.aws.runtime_server import dummy_credentials, runtime_server

FILES = Path(__file__).parents[1] / "data" / "deploy"
JUMPSTART = {"SM_NUM_GPUS": "1", "MAX_INPUT_LENGTH": "400", "MAX_TOTAL_TOKENS": "512"}


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch, tmp_path):
    dummy_credentials(monkeypatch, tmp_path)


class LineIterator:
    """The first post's reader, with its newline mended: bytes are kept until a line is whole.

    When the stream has ended within a line, the post's class looks for more and never stops; here
    that fails the test.
    """

    def __init__(self, stream):
        self.byte_iterator = iter(stream)
        self.buffer = io.BytesIO()
        self.read_pos = 0

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            self.buffer.seek(self.read_pos)
            line = self.buffer.readline()
            if line and line[-1] == ord("\n"):
                self.read_pos += len(line)
                return line[:-1]
            try:
                chunk = next(self.byte_iterator)
            except StopIteration:
                assert self.read_pos == self.buffer.getbuffer().nbytes, "would wait for ever"
                raise
            self.buffer.seek(0, io.SEEK_END)
            self.buffer.write(chunk["PayloadPart"]["Bytes"])


def runtime(url, **config):
    return boto3.client("sagemaker-runtime", endpoint_url=url, config=Config(**config))


def streamed_lines(url, text, **parameters):
    """As the first post asks: no `stream` in the body, the operation streams."""
    body = {"inputs": text, "parameters": parameters}
    reply = runtime(url).invoke_endpoint_with_response_stream(
        EndpointName="endpoint", Body=json.dumps(body), ContentType="application/json"
    )
    return [json.loads(line) for line in LineIterator(reply["Body"])]


def invoked(client, text, **parameters):
    body = {"inputs": text, "parameters": parameters}
    reply = client.invoke_endpoint(EndpointName="endpoint", Body=json.dumps(body), ContentType="application/json")
    return reply["Body"].read().decode("utf8")


@contextmanager
def serving(*args):
    server = Server(*args)
    try:
        yield server
    finally:
        server.code, server.said = server.stop()


def simulated(file, instance):
    return ("--executor", "simulated", "--instance", instance, "--serving-properties", str(file))


def test_the_first_posts_file_and_client_stream_lines_and_end(tmp_path):
    """Tokens are printed where they have text, the last line has the whole and its reason; the next
    request goes on from it, as the post chains requests of a long article."""
    file = tmp_path / "serving.properties"
    file.write_text(
        "engine=MPI\noption.model_id=mistralai/Mistral-7B-v0.1\n"
        "option.tensor_parallel_degree=max\noption.rolling_batch=auto\n"
        "option.max_rolling_batch_size=64\noption.output_formatter=jsonlines\n"
        "option.trust_remote_code=true\noption.model_loading_timeout=7200\n"
    )
    with serving(*simulated(file, "ml.g5.12xlarge")) as server:
        text = "What is the meaning of life?"
        for _ in range(2):
            lines = streamed_lines(server.url, text, max_new_tokens=4, details=True)
            said = [line["token"].get("text") for line in lines]
            assert len(lines) == 4
            assert [*lines[0]["token"]] == ["id", "text", "log_prob"]
            assert lines[-1]["generated_text"] == "".join(said)
            assert lines[-1]["details"]["finish_reason"] == "length"
            text += lines[-1]["generated_text"]
        whole = invoked(runtime(server.url), text, max_new_tokens=2).splitlines()
        assert "generated_text" in json.loads(whole[-1])
    assert server.code == 0
    assert "answers of the LMI routes: rolling, always in lines" in server.said
    assert "option.trust_remote_code=true: no code of the model is run here" in server.said
    assert "without effect" not in server.said


def test_jumpstarts_client_finds_its_token_count_in_a_list(monkeypatch):
    """Also over threads with the retries of the post's batch client: 40 requests, each with 5."""
    for name, value in JUMPSTART.items():
        monkeypatch.setenv(name, value)
    retries = Config(retries={"max_attempts": 20, "mode": "standard"}, max_pool_connections=8)
    asked = {"max_new_tokens": 5, "details": True, "return_full_text": False}
    with serving(*("--executor", "simulated", "--instance", "ml.g5.2xlarge", "--model", "llama-2-7b")) as server:
        client = boto3.client("sagemaker-runtime", endpoint_url=server.url, config=retries)
        with ThreadPoolExecutor(8) as pool:
            texts = [*pool.map(lambda n: invoked(client, f"prompt {n}", **asked), range(40))]
        with pytest.raises(ClientError) as refused:
            invoked(client, "word " * 401, max_new_tokens=5)
        reply = client.invoke_endpoint_with_response_stream(
            EndpointName="endpoint", Body=json.dumps({"inputs": "a", "parameters": asked, "stream": True})
        )
        events = b"".join(event["PayloadPart"]["Bytes"] for event in reply["Body"])
    responses = [json.loads(text) for text in texts]
    assert [response[0]["details"]["generated_tokens"] for response in responses] == [5] * 40
    assert all(response[0]["generated_text"] for response in responses)
    assert refused.value.response["OriginalStatusCode"] == 422
    assert "must have less than 400 tokens" in refused.value.response["OriginalMessage"]
    assert reply["ContentType"] == "text/event-stream"
    assert events.count(b"data:") == 5
    assert "as a TGI container's" in server.said


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_of_lines_ends_whatever_the_container_answers(stream):
    """Also where the reply is one JSON object, whose line a container does not end."""
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3}, "stream": stream}
    with runtime_server() as url:
        reply = runtime(url).invoke_endpoint_with_response_stream(EndpointName="endpoint", Body=json.dumps(body))
        lines = [json.loads(line) for line in LineIterator(reply["Body"])]
    assert len(lines) == (3 if stream else 1)
    assert len(lines[-1]["generated_text"].split()) == 3


@pytest.mark.parametrize(
    ("name", "version", "engine"),
    [
        ("falcon_dynamic", NEWEST, {"policy": "dynamic", "batch_size": 4}),
        ("falcon_continuous", "0.26.0", {"policy": "rolling", "kv_layout": "contiguous"}),
        ("falcon_paged", "0.26.0", {"policy": "rolling", "kv_layout": "paged"}),
        ("mistral_tensorrt", "0.32.0", {"policy": "rolling", "max_rolling_batch_size": 32}),
    ],
)
def test_published_files_are_taken_verbatim_by_the_container_they_are_for(name, version, engine):
    path, notes = FILES / f"{name}.properties", []
    assert container_for(read_properties(path)) == version
    found = read_serving_file(path, {}, simulated=True, note=notes.append, djl_version=None)
    assert engine.items() <= found.engine.items()
    assert found.model is not None
    assert found.model.count("/") == 1
    assert found.lmi_replies == ("rolling" if engine["policy"] == "rolling" else "batched")
    assert (found.lmi_streams is True) == ("jsonlines" in path.read_text())
    said = " ".join(notes)
    assert (f"read as djl-serving {version}" in said) == (version != NEWEST)
    assert ("no code of the model is run here" in said) == ("trust" in path.read_text())


def test_a_published_model_name_of_two_parts_is_served_from_the_file():
    """Falcon's paged file without a change: eight of a g5.48xlarge's GPUs, lines as it says."""
    file = FILES / "falcon_paged.properties"
    with serving(*simulated(file, "ml.g5.48xlarge")) as server:
        lines = streamed_lines(server.url, "a b c", max_new_tokens=2)
    assert len(lines) == 2
    assert server.code == 0


def settings_of(**values):
    return {
        f"option.{name}": Setting(value if isinstance(value, str) else json.dumps(value), "file")
        for name, value in values.items()
    }


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear:2.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn:4"),
        ({"rotary_scaling_type": "dynamic", "rotary_scaling_factor": "4.0"}, "dynamic:4.0"),
        ({"hf_overrides": {"rope_scaling": {"type": "dynamic", "factor": 2}}}, "dynamic:2"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 2}}}, "yarn:2"),
    ],
)
def test_every_way_to_write_rope_scaling_is_applied(options, scaling):
    """0.26 added it to LMI-Dist, vLLM and TensorRT-LLM, each with its own keys."""
    found = bundled_settings(settings_of(**options), era="A")
    assert found.engine["rope_scaling"] == scaling
    assert found.ignored == ()


def test_rope_scaling_that_the_engine_lacks_is_refused_by_name():
    with pytest.raises(InputError, match="linear, dynamic, yarn"):
        bundled_settings(settings_of(rope_scaling={"rope_type": "llama3", "factor": 8}))


@pytest.mark.parametrize(
    ("formatter", "era", "streams"),
    [
        ("jsonlines", "A", True),
        ("jsonlines", "B", True),
        ("json", "B", False),
        ("jsonlines", "C", None),
        (None, "A", None),
    ],
)
def test_a_named_formatter_decides_over_the_request_up_to_034(formatter, era, streams):
    named = {} if formatter is None else {"output_formatter": formatter}
    found = bundled_settings(settings_of(rolling_batch="auto", **named), era=era)
    assert found.lmi_streams is streams
    assert ("option.output_formatter" in found.ignored) == (formatter is not None and era == "C")


BATCHED = "option.model_id=llama-2-7b\nengine=Python\noption.rolling_batch=disable\nbatch_size=4\n"


def test_dynamic_batching_answers_in_a_list_one_object_for_each_input(tmp_path):
    """As djl-serving's schema of dynamic batches says: an array of strings, or one string."""
    file = tmp_path / "dynamic.properties"
    file.write_text(BATCHED)
    with serving(*simulated(file, "ml.g5.2xlarge")) as server:
        client = runtime(server.url)
        one = json.loads(invoked(client, "a b", max_new_tokens=2, details=True))
        three = json.loads(invoked(client, ["a", "b", "c"], max_new_tokens=3))
        with pytest.raises(ClientError, match="must be a non-empty string"):
            invoked(client, ["a", ""])
    assert [list(each) for each in one] == [["generated_text"]]
    assert [bool(each["generated_text"]) for each in three] == [True] * 3


@pytest.mark.parametrize(
    ("options", "compiles", "said"),
    [
        ({"rolling_batch": "trtllm"}, True, "option.rolling_batch=trtllm: decode steps"),
        ({"rolling_batch": "tnx"}, True, "option.rolling_batch=tnx: decode steps"),
        ({"neuron_optimize_level": "2"}, True, "option.neuron_optimize_level: decode steps"),
        ({"rolling_batch": "vllm"}, None, ""),
    ],
)
def test_back_ends_that_serve_compiled_models_compile_and_say_so(options, compiles, said):
    found = bundled_settings(settings_of(**options))
    assert found.engine.get("compile") is compiles
    assert [note for note in found.notes if "compiled at start" in note][:1] == [
        note for note in found.notes if said and note.startswith(said)
    ]
    assert bundled_settings(settings_of(**options), simulated=True).engine.get("compile") is None


def test_a_files_strategy_for_kv_heads_reaches_the_engine():
    found = bundled_settings(settings_of(group_query_attention="replicated-heads"))
    assert found.engine["group_query_attention"] == "replicated-heads"
    assert "option.group_query_attention" not in found.ignored
