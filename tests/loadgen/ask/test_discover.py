"""Pointing at a URL is enough: each kind of server, played by a few routes, is found out."""

import contextlib
import http.client
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.loadgen.ask import discover, probe
from lmi_bench.loadgen.ask.discover import TIMEOUT_S, Accepted, takes_token_ids
from lmi_bench.loadgen.ask.probe import Probe
from lmi_bench.targets.bench import Access
from tests.loadgen.aws.runtime_server import runtime_server

MODELS = {"data": [{"id": "org/model", "owned_by": "vllm", "root": "/m", "max_model_len": 4096}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
TGI_LINES = [
    {"index": 1, "token": {"id": 5, "text": "a"}, "generated_text": None, "details": None},
    {
        "index": 2,
        "token": {"id": 6, "text": "b"},
        "generated_text": "ab",
        "details": {"finish_reason": "length", "generated_tokens": 2, "input_length": 1},
    },
]
LMI_LINES = [
    {"token": {"id": 5, "text": "a", "log_prob": -0.1}},
    {
        "token": {"id": 6, "text": "b", "log_prob": -0.1},
        "generated_text": "ab",
        "details": {"finish_reason": "length", "generated_tokens": 2},
    },
]


def found_at(url, headers=None, *, protocol=None, model=None, stream=True, **asking):
    asked = Probe(url, headers or {}, **asking)
    return discover.discover(asked, protocol=protocol, model=model, stream=stream)


def accepts(url, headers=None, **request):
    return discover.accepts(Probe(url, headers or {}, timeout_s=TIMEOUT_S), **request)


def events(*objects, done=True):
    end = b"data: [DONE]\n\n" if done else b""
    return b"".join(b"data: " + json.dumps(o).encode() + b"\n\n" for o in objects) + end


def completion(text, reason=None):
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def chat(delta, reason=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def good_completions(body):
    return 200, "text/event-stream", events(completion("a"), completion("b", "length"), USAGE)


def good_chat(body):
    first = chat({"role": "assistant", "content": ""})
    return 200, "text/event-stream", events(first, chat({"content": "a"}, "length"))


def good_tgi(body):
    return 200, "text/event-stream", events(*TGI_LINES, done=False)


def good_lmi(body):
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in LMI_LINES)
    return 200, "application/jsonlines", lines


def says(content, status=200):
    return lambda body: (status, "application/json", json.dumps(content).encode())


@contextmanager
def playing(routes):
    """A server of these routes, (method, path) to a function of the body; asked: what came."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.command, self.path, body, dict(self.headers)))
            route = routes.get((self.command, self.path), says({"error": "no"}, 404))
            status, kind, content = route(body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_our_own_server_is_found_with_its_model_and_context():
    with runtime_server() as url:
        found = found_at(url)
    assert (found.protocol, found.model, found.max_model_len) == ("openai", "toy", 512)
    assert found.states_counts
    assert found.forces_length


@pytest.mark.parametrize("owner", ["me", "", None])
def test_a_server_that_names_nobody_is_called_what_it_speaks(owner):
    """llama-cpp-python's models are owned by "me"."""
    routes = {
        ("GET", "/v1/models"): says({"data": [{"id": "m.gguf", "owned_by": owner}]}),
        ("POST", "/v1/completions"): good_completions,
    }
    with playing(routes) as (url, _):
        assert found_at(url).server == "an OpenAI-compatible server"


def test_vllm_states_its_version():
    routes = {
        ("GET", "/v1/models"): says(MODELS),
        ("GET", "/version"): says({"version": "0.12.0"}),
        ("POST", "/v1/completions"): good_completions,
    }
    with playing(routes) as (url, _):
        assert found_at(url).server == "vllm 0.12.0"
        del routes["GET", "/version"]
        assert found_at(url).server == "vllm"


@pytest.mark.parametrize(
    ("to_ids", "to_text", "takes_them"),
    [(200, 200, True), (500, 200, False), (400, 200, False), (503, 200, True), (401, 401, True)],
)
def test_a_server_that_refuses_token_ids_alone_is_sent_text(to_ids, to_text, takes_them):
    """llama-cpp-python answers 500 to ids; one that refuses both says why when it is measured."""

    def route(body):
        status = to_text if isinstance(json.loads(body)["prompt"], str) else to_ids
        return (status, *good_completions(body)[1:])

    with playing({("POST", "/v1/completions"): route}) as (url, _):
        assert takes_token_ids(Probe(url, {}), model="m") is takes_them


def test_vllm_is_an_openai_server_with_a_context():
    routes = {("GET", "/v1/models"): says(MODELS), ("POST", "/v1/completions"): good_completions}
    for path in ("", "/", "/v1", "/v1/completions"):
        with playing(routes) as (url, asked):
            found = found_at(url + path)
        assert (found.protocol, found.model, found.server) == ("openai", "org/model", "vllm")
        assert (found.max_model_len, found.tokenizer) == (4096, "/m")
        assert [a[1] for a in asked if a[0] == "POST"] == ["/v1/completions"]


def test_a_server_without_completions_is_taken_as_a_chat():
    routes = {("GET", "/v1/models"): says(MODELS), ("POST", "/v1/chat/completions"): good_chat}
    with playing(routes) as (url, _):
        found = found_at(url)
    assert found.protocol == "openai-chat"
    assert not found.states_counts


def test_tgi_is_told_from_its_openai_side_by_info():
    routes = {
        ("GET", "/info"): says({"model_id": "tiiuae/f", "max_total_tokens": 2048, "version": "3"}),
        ("GET", "/v1/models"): says(MODELS),
        ("POST", "/generate_stream"): good_tgi,
        ("POST", "/v1/completions"): good_completions,
    }
    with playing(routes) as (url, _):
        found = found_at(url)
    assert (found.protocol, found.model, found.max_model_len) == ("tgi", "tiiuae/f", 2048)
    assert found.states_counts
    assert not found.forces_length


def test_another_server_with_tgis_routes_is_asked_for_its_models_first():
    """Its completions can force a length; where it has none, TGI's routes are taken."""
    info = {"model_id": "toy", "max_total_tokens": 512, "version": "1", "router": "another"}
    routes = {("GET", "/info"): says(info), ("POST", "/generate_stream"): good_tgi}
    with playing(routes) as (url, _):
        assert found_at(url).protocol == "tgi"
    routes |= {("GET", "/v1/models"): says(MODELS), ("POST", "/v1/completions"): good_completions}
    with playing(routes) as (url, _):
        found = found_at(url)
        stated = found_at(url, protocol="tgi")
        by_path = found_at(url + "/generate_stream")
    assert (found.protocol, found.server) == ("openai", "vllm")
    assert stated.protocol == by_path.protocol == "tgi"


def test_the_bundled_server_is_found_as_it_was_before_it_had_tgis_routes():
    with runtime_server(signed=False) as url:
        plain = found_at(url)
        named = found_at(url, protocol="tgi")
        paths = {path: found_at(url + path).protocol for path in ("/generate", "/invocations")}
    assert (plain.protocol, plain.model, plain.server) == ("openai", "toy", "lmi-bench")
    assert plain.forces_length
    assert (plain.max_model_len, named.max_model_len) == (512, 512)
    assert (named.protocol, named.model, named.states_counts) == ("tgi", "toy", True)
    assert paths == {"/generate": "tgi", "/invocations": "lmi"}


def test_an_lmi_container_answers_ping_and_invocations():
    routes = {("GET", "/ping"): says({}), ("POST", "/invocations"): good_lmi}
    with playing(routes) as (url, _):
        assert found_at(url).protocol == "lmi"
        assert found_at(url + "/invocations").protocol == "lmi"


def test_a_server_that_says_nothing_of_itself_is_tried():
    with playing({("POST", "/v1/chat/completions"): good_chat}) as (url, _):
        assert found_at(url).protocol == "openai-chat"


def test_a_server_that_refuses_to_force_lengths_is_asked_without():
    def strict(body):
        if "ignore_eos" in json.loads(body):
            return says({"error": {"message": "Unrecognized argument: ignore_eos"}}, 400)(body)
        return good_completions(body)

    routes = {("GET", "/v1/models"): says(MODELS), ("POST", "/v1/completions"): strict}
    with playing(routes) as (url, _):
        found = found_at(url)
    assert found.protocol == "openai"
    assert not found.forces_length


def test_what_is_given_is_kept_and_checked():
    two = {"data": [{"id": "a"}, {"id": "b"}]}
    routes = {
        ("GET", "/v1/models"): says(two),
        ("POST", "/v1/completions"): good_completions,
        ("POST", "/v1/chat/completions"): good_chat,
    }
    with playing(routes) as (url, asked):
        found = found_at(url, protocol="openai-chat", model="b")
        assert (found.protocol, found.model) == ("openai-chat", "b")
        assert json.loads(asked[-1][2])["model"] == "b"
        assert "2 models" in found_at(url).notes[0]
        with pytest.raises(InputError, match="no model 'c': it has a, b"):
            found_at(url, model="c")


def test_a_missing_key_is_asked_for_and_a_given_one_is_sent():
    def locked(body):
        return says({"error": "Unauthorized"}, 401)(body)

    with playing({("GET", "/v1/models"): locked}) as (url, asked), pytest.raises(InputError, match="--api-key"):
        found_at(url, headers={"Authorization": "Bearer k"})
    assert all(headers["Authorization"] == "Bearer k" for *_, headers in asked)


def test_a_server_of_no_known_protocol_lists_what_was_tried():
    with playing({}) as (url, _), pytest.raises(InputError, match="tgi: HTTP 404") as caught:
        found_at(url)
    assert "tgi: HTTP 404" in str(caught.value)


def test_an_unstreamed_answer_is_judged_whole():
    def whole(body):
        assert json.loads(body)["stream"] is False
        return says(completion("ab", "length") | {"usage": USAGE["usage"]})(body)

    routes = {("GET", "/v1/models"): says(MODELS), ("POST", "/v1/completions"): whole}
    with playing(routes) as (url, _):
        assert found_at(url, stream=False).states_counts


def test_nothing_at_an_address_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(InputError, match="nothing answers at"):
        found_at(f"http://127.0.0.1:{port}")


def test_an_answer_that_never_ends_is_given_up():
    def slow(body):
        threading.Event().wait(0.5)
        return good_completions(body)

    routes = {("GET", "/v1/models"): says(MODELS), ("POST", "/v1/completions"): slow}
    with playing(routes) as (url, _), pytest.raises(InputError, match=r"within 0\.1 s"):
        found_at(url, timeout_s=0.1)


@contextmanager
def endless():
    """A completions server that goes on when its tokens are spent, until the client hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while not stopped.wait(0.001):
                    self.wfile.write(events(completion("a"), done=False))

        def log_message(self, *args):
            pass

    stopped = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_stream_without_an_end_is_told_of_and_then_refused(monkeypatch):
    """Long before the time-out of 60 s, and with the way to measure such a server all the same."""
    monkeypatch.setattr(probe, "TELL_AFTER_S", 1.0)  # others take less, even if busy
    monkeypatch.setattr(probe, "OVERRUN_S", 2.0)
    told = []
    with endless() as url, pytest.raises(InputError, match="does not end its answer") as caught:
        found_at(url, tell=told.append)
    assert "With --protocol and --model" in str(caught.value)
    (line,) = told
    assert line.endswith("to answer POST /v1/completions, 60 s at most")


def test_a_server_that_streams_on_is_accepted_where_protocol_and_model_are_stated():
    with endless() as url:
        assert accepts(url, protocol="openai", model="m") == Accepted()
        assert takes_token_ids(Probe(url, {}), model="m")


def test_a_server_that_says_nothing_is_told_of_at_each_question(monkeypatch):
    monkeypatch.setattr(probe, "TELL_AFTER_S", 0.02)
    monkeypatch.setattr(probe, "GET_TIMEOUT_S", 0.2)
    told = []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(InputError, match=r"no whole answer to POST .* within 0\.3 s"):
            found_at(url, timeout_s=0.3, tell=told.append)
    asked = [line.split("to answer ")[1] for line in told]
    assert asked == [
        "GET /info, 0.2 s at most",
        "GET /v1/models, 0.2 s at most",
        "GET /ping, 0.2 s at most",
        "POST /v1/completions, 0.3 s at most",
    ]


def test_a_server_that_answers_in_time_is_waited_for_in_silence():
    told = []
    with playing({("POST", "/v1/completions"): good_completions}) as (url, _):
        found_at(url, tell=told.append)
    assert told == []


@pytest.mark.parametrize(
    ("status", "said", "headers", "shown"),
    [
        (401, "no", {}, r"wants a key \(HTTP 401: no\): give --api-key"),
        (403, "no", {"Authorization": "Bearer x"}, r"refuses the key that it is given .*: no\)"),
        (404, "no m here.", {}, r"model 'm' \(it has org/model\): HTTP 404: no m here\. Leave"),
        (400, "bad", {}, "refuses protocol openai with model 'm'.*HTTP 400: bad"),
    ],
)
def test_what_every_request_would_be_refused_for_is_one_line_at_once(status, said, headers, shown):
    routes = {
        ("GET", "/v1/models"): says(MODELS),
        ("POST", "/v1/completions"): says({"error": {"message": said}}, status),
    }
    with playing(routes) as (url, _), pytest.raises(InputError, match=shown):
        accepts(url, protocol="openai", model="m", headers=headers)


@pytest.mark.parametrize("status", [429, 499, 500, 503])
def test_what_may_pass_is_left_to_be_measured(status):
    routes = {("POST", "/v1/completions"): says({"error": "busy"}, status)}
    with playing(routes) as (url, _):
        assert accepts(url, protocol="openai", model="m") == Accepted()


def test_a_container_that_had_no_slot_in_time_is_busy_although_it_says_400():
    said = {"code": 400, "type": "TranslateException", "message": "Time out in: 60000"}
    with playing({("POST", "/invocations"): says(said, 400)}) as (url, _):
        assert accepts(url, protocol="lmi", model="m") == Accepted()


MESSAGE = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 8, "output_tokens": 1}}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
    {"type": "message_stop"},
]
RESPONSE = [
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.completed", "response": {"status": "completed", "usage": {}}},
]


@pytest.mark.parametrize(
    ("protocol", "path", "stream", "forces"),
    [("anthropic", "/v1/messages", MESSAGE, False), ("openai-responses", "/v1/responses", RESPONSE, True)],
)
def test_an_api_that_servers_have_beside_openais_is_used_only_if_it_is_named(protocol, path, stream, forces):
    routes = {
        ("GET", "/v1/models"): says({"data": [{"id": "m", "type": "model"}]}),
        ("POST", path): lambda _: (200, "text/event-stream", events(*stream, done=False)),
    }
    with playing(routes) as (url, asked):
        found = found_at(url, protocol=protocol)
        assert (found.protocol, found.model, found.forces_length) == (protocol, "m", forces)
        asked.clear()
        with pytest.raises(InputError, match="no protocol known here"):
            found_at(url)
    assert path not in {each[1] for each in asked}


def test_openais_responses_are_asked_for_as_many_tokens_as_they_take():
    """OpenAI's API answers 400 to a max_output_tokens below 16."""

    def strict(body):
        if json.loads(body)["max_output_tokens"] < 16 or "ignore_eos" in json.loads(body):
            return says({"error": {"message": "no"}}, 400)(body)
        return 200, "text/event-stream", events(*RESPONSE, done=False)

    with playing({("POST", "/v1/responses"): strict}) as (url, _):
        assert not accepts(url, protocol="openai-responses", model="m").forces_length


def test_a_redirect_is_not_measured():
    routes = {("POST", "/v1/completions"): says({}, 308)}
    with playing(routes) as (url, _), pytest.raises(InputError, match="is the address right"):
        accepts(url, protocol="openai", model="m")


def test_a_stated_server_that_refuses_a_forced_length_is_found_out():
    def route(body):
        return good_completions(body) if "ignore_eos" not in json.loads(body) else (400, "x", b"")

    with playing({("POST", "/v1/completions"): route}) as (url, asked):
        assert not accepts(url, protocol="openai", model="m").forces_length
        assert len(asked) == 2


@pytest.mark.parametrize("end", [True, False])
def test_a_chat_server_that_knows_only_the_older_length_is_asked_by_it(monkeypatch, end):
    """llama-cpp-python: without `max_tokens` it goes on to the end of the context, or beyond it."""
    monkeypatch.setattr(probe, "MAX_REPLY_BYTES", 20_000)

    def route(body):
        tokens = json.loads(body).get("max_tokens", 50 if end else 2_000)
        chunks = [chat({"content": "a"}) for _ in range(tokens)]
        return 200, "text/event-stream", events(*chunks, chat({}, "length"), done=end)

    with playing({("POST", "/v1/chat/completions"): route}) as (url, asked):
        found = found_at(url, protocol="openai-chat")
        taken = accepts(url, protocol="openai-chat", model="m")
        assert found.wire_format is taken.wire_format
        assert found.wire_format.length_field == "max_tokens"
        assert "requested as max_tokens" in found.notes[0]
        assert json.loads(asked[-1][2])["max_tokens"] == 2


def test_a_chat_server_that_keeps_to_the_newer_length_is_asked_by_it_alone():
    """OpenAI's reasoning models refuse `max_tokens`."""
    with playing({("POST", "/v1/chat/completions"): good_chat}) as (url, asked):
        assert found_at(url, protocol="openai-chat").wire_format is None
    (body,) = [json.loads(each[2]) for each in asked if each[0] == "POST"]
    assert body["max_completion_tokens"] == 2
    assert "max_tokens" not in body


def test_what_a_server_repeats_of_a_key_is_not_shown():
    said = {"error": {"message": "wrong key abcdefghijklmnop"}}
    routes = {("POST", "/v1/completions"): says(said, 401)}
    key = {"Authorization": "Bearer abcdefghijklmnop"}
    with playing(routes) as (url, _), pytest.raises(InputError, match="wrong key <redacted>"):
        accepts(url, protocol="openai", model="m", headers=key)


def test_credentials_in_a_url_are_sent_and_not_shown():
    with playing({("POST", "/v1/completions"): says({}, 404)}) as (url, asked):
        with pytest.raises(InputError) as caught:
            accepts(url.replace("//", "//me:hidden@"), protocol="openai", model="m")
        assert "Authorization" in asked[0][3]
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("reason", ["length", None])
def test_a_server_whose_answers_end_without_a_reason_is_warned_of(reason):
    """Cut by a proxy that adds its own [DONE], such an answer looks whole."""
    answer = events(completion("a"), completion("b", reason), USAGE)
    routes = {("POST", "/v1/completions"): lambda _: (200, "text/event-stream", answer)}
    with playing(routes) as (url, _):
        notes = found_at(url, protocol="openai", model="m").notes
    assert any("finish_reason" in note for note in notes) is (reason is None)


@pytest.mark.parametrize(("proxy", "is_named"), [("http://me:pass@127.0.0.1:9", True), ("", False)])
def test_a_proxy_that_does_not_answer_is_named(monkeypatch, proxy, is_named):
    def connect(self):
        raise TimeoutError

    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    with pytest.raises(InputError, match=r"no connection to example\.org") as caught:
        found_at("http://example.org")
    named = "through the environment's proxy http://127.0.0.1:9 within"
    assert (named in str(caught.value)) is is_named


@pytest.mark.parametrize(
    ("url", "headers", "said"),
    [
        ("http://a..b:8000", {}, "'http://a..b:8000' is not a URL"),
        ("http://localhost:80x0", {}, "is not a URL"),
        ("http://localhost:1", {"X-A": "sk-123\nB: c"}, "value of header 'X-A' must be one line"),
        ("http://localhost:1", {"X-A": "sk-123\u2028"}, "value of header 'X-A' must be one line"),
    ],
)
def test_what_cannot_be_sent_is_named_before_a_connection(url, headers, said):
    with pytest.raises(InputError, match=said) as caught:
        Probe(url, headers)
    assert "sk-123" not in str(caught.value)


def test_the_newline_at_the_end_of_a_keys_file_is_no_part_of_the_key():
    access = Access("sk-1234567890\n")
    assert access.all_headers() == {"Authorization": "Bearer sk-1234567890"}
    assert access.secrets() == ("sk-1234567890",)
    assert Access(" \n").api_key is None
