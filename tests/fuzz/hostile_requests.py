"""Hostile HTTP requests from a seed: right ones with wrong values, bytes, headers and framing.

Each begins as a request that a route of `serve` answers. Nothing here knows what is refused: the
test beside it says what no request may do to the server.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from copy import deepcopy
from dataclasses import dataclass

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.fuzz.torn import torn

KEY = "fuzz"
HOST = b"127.0.0.1"
WAITING_S = 0.05
"""Time that a client gives a request whose end the server cannot see."""

TOKENS = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.1}
OPENAI = TOKENS | {
    "model": "",  # the served one, see `hostile_request`
    "max_tokens": 4,
    "min_tokens": 1,
    "n": 2,
    "best_of": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "ignore_eos": True,
    "stream": False,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "logprobs": 2,
    "return_token_ids": True,
    "truncate_prompt_tokens": 9,
    "include_stop_str_in_output": True,
    "skip_special_tokens": True,
    "logit_bias": {},
    "user": "u",
}
CHAT = OPENAI | {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]},
    ],
    "logprobs": True,
    "top_logprobs": 2,
    "max_completion_tokens": 4,
    "chat_template_kwargs": {"x": 1},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
LMI = {
    "inputs": "Once upon a time",
    "stream": False,
    "parameters": TOKENS
    | {"max_new_tokens": 4, "min_new_tokens": 1, "do_sample": True, "details": True}
    | {"return_full_text": True, "top_n_tokens": 2, "truncate": 9, "stop_sequences": ["a"]}
    | {"ignore_eos_token": True, "watermark": False, "typical_p": 1, "n": 1},
}
TGI = {
    "inputs": "Once upon a time",
    "stream": False,
    "parameters": TOKENS
    | {"max_new_tokens": 4, "do_sample": True, "details": True, "best_of": 1, "stop": ["a"]}
    | {"return_full_text": True, "top_n_tokens": 2, "truncate": 9, "frequency_penalty": 0.2}
    | {"decoder_input_details": False, "watermark": False, "grammar": None, "adapter_id": None},
}
ROUTES = (
    ("POST", "/invocations", LMI),
    ("POST", "/predictions/MODEL", LMI),
    ("POST", "/v1/completions", OPENAI | {"prompt": "Once upon a time", "echo": False}),
    ("POST", "/v1/completions", OPENAI | {"prompt": [[1, 2, 3, 4]], "logprobs": None}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/generate", TGI),
    ("POST", "/generate_stream", TGI),
    ("POST", "/", TGI),
    ("POST", "/endpoints/any/invocations", LMI),
    ("POST", "/endpoints/any/invocations", OPENAI | {"prompt": "Once"}),
    ("POST", "/endpoints/any/invocations-response-stream", LMI | {"stream": True}),
    ("POST", "/endpoints/any/invocations-response-stream", CHAT),
    ("GET", "/", None),
    ("GET", "/ping", None),
    ("POST", "/ping", {}),
    ("GET", "/health", None),
    ("GET", "/info", None),
    ("GET", "/v1/models", None),
    ("GET", "/metrics", None),
)

KEPT = (
    *("inputs", "prompt", "messages", "parameters"),
    *("max_tokens", "max_completion_tokens", "max_new_tokens"),  # else all of the context
)
NASTY = (
    *(None, True, False, -1, 0, 1, 2.5, 2**31, -(2**31), 2**53, 2**63, 2**64, -(2**63), -1e308),
    *(1e-320, 0.1, "", " ", "x", "0", "inf", "nan", "\x00", "é日\U0001f600", "\u202e", "{}", "%s"),
    *("{0}", "{x}", "<script>", "../../etc/passwd", "a" * 3000, "a\r\nX-Evil: 1", "\ufffe"),
    *([], [[]], [None], ["", ""], [1, "a"], ["a"] * 17, [2**40], [-1], {}, {"a": {}}, {"": 0}),
)
RAW = (
    *(b"1e999", b"-1e999", b"NaN", b"-Infinity", b"9" * 400, b"-0", b"01", b"1.", b'"\\ud800"'),
    *(b'"\\udfff\\ud800"', b'"\xff"', b'"\xc3"', b"'a'", b'"a', b"\x00", b"tru", b"1_0", b"0x1"),
    *(b"[" * 300 + b"]" * 300, b'{"a":' * 300 + b"1" + b"}" * 300, b"[" * 900 + b"]" * 900),
    *(b"[" * 5000, b"[" * 5000 + b"]" * 5000, b"[" + b"1," * 5000 + b"1]", b'"' + b"word " * 900),
    *(b'{"a":1,"a":2}', b"/**/1", b"1e-999", b"123456789012345678901234567890.5"),
)
"""Values that no `json.dumps` writes; each stands where HOLE is."""
HOLE = "HOLE-51c6"

METHODS = (
    *("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW"),
    *("get", "G ET", "", "P\x00ST", "é"),
)
PATHS = (
    *("", "*", "/%", "/%ff", "/%00", "/%2e%2e/%2e%2e/etc/passwd", "//", "/ping/", "/a b"),
    *("///ping", "/../../etc/passwd", "/ping?", "/ping?a=%ff&a&&=", "/ping#a", "/predictions/%ff"),
    *("/predictions/", "/predictions/../x", "/predictions/a%2fb", "/v1/models/x", "/v1/%ff"),
    *("/endpoints//invocations", "/endpoints/%ff/invocations", "/endpoints/a/invocations?x=%zz"),
    *("http://[::1", "http://a/ping", "//evil/ping", "/\xff\xfe", "/v1/\xff", "/é", "/\ud800"),
    *("/generate\xff", "/predictions/\xff", "/admin", "/models", "/tokenize", "/" + "a" * 9000),
    *("/endpoints/\xff/invocations", "/ping;a=1", "/ping\\x", "/a?" + "b" * 9000, "/\x7f"),
)
VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.", "HTP/1.1", "", "HTTP/1.1 x")
HEADERS = (
    *(b"Content-Encoding: gzip", b"Content-Encoding: deflate", b"Content-Encoding: br"),
    *(b"Content-Encoding: x, gzip", b"Content-Encoding: \xff", b"Content-Encoding: zstd"),
    *(b"Content-Type: text/plain; charset=none", b"Content-Type: application/json; charset=utf-16"),
    *(b"Content-Type: \xff", b"Content-Type: multipart/form-data", b"Content-Type: ;;;=\x01"),
    *(b"Expect: 100-continue", b"Expect: 200-ok", b"Expect: \xff", b"Upgrade: websocket"),
    *(b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13", b"Upgrade: h2c"),
    *(b"Connection: close", b"Connection: keep-alive, close, \xff", b"Keep-Alive: timeout=-1"),
    *(b"Cookie: a=b; c; =d; \xff=\x01", b"Range: bytes=9-1", b"If-Modified-Since: \xff"),
    *(b"Host: \xff", b"Host: a\r\nHost: b", b"Host: [::1", b"X-Forwarded-For: \xff", b": a", b"a"),
    *(b"X-A: " + b"a" * 9000, b"\r\n".join(b"X-%d: a" % n for n in range(300)), b"X A: b"),
    *(b"X-A: a\r\n b", b"X-A: a\x00b", b"X-A\x00: b", b"\xff: b", b"X-A: a\rb", b"X-A: a\nX-B: b"),
    *(b"Authorization: \xff", b"Authorization: Bearer", b"Authorization: Bearer \xc3\xa9"),
    *(b"Authorization: AWS4-HMAC-SHA256 ,=,==", b"X-Amz-Date: \xff"),
    b"X-Amz-Date: 99999999T999999Z",
    *(b"Transfer-Encoding: identity", b"Transfer-Encoding: gzip, chunked", b"TE: trailers"),
    *(b"X-Amzn-SageMaker-Custom-Attributes: \xff", b"Accept: \xff", b"Accept-Encoding: gzip;q=x"),
)
LENGTHS = (
    *(b"-1", b"+5", b"0x10", b"1e3", b"", b" ", b"9" * 30, b"1,1", b"\xff", b"99999999"),
    b"5\r\nContent-Length: 6",
)


@dataclass(frozen=True, slots=True)
class Hostile:
    """The bytes of one request, in the pieces in which they are sent.

    waits  False: the server may wait for more, so its client leaves after WAITING_S
    """

    pieces: tuple[bytes, ...]
    method: str
    waits: bool = True


def hostile_request(draw: random.Random, model: str, *, signed: bool = False) -> Hostile:
    """The next request of a draw. `signed`: some carry a signature of AWS's, right or wrong."""
    method, path, body = draw.choice(ROUTES)
    path = path.replace("MODEL", model)
    data = b"" if body is None else _body(draw, body, model)
    headers = [b"Host: " + HOST, b"Content-Type: application/json"]
    if draw.random() < 0.9:
        headers.append(b"Authorization: Bearer " + KEY.encode())
    if signed and path.startswith("/endpoints/") and draw.random() < 0.8:
        headers = _signed(draw, path, data)
    if draw.random() < 0.1:
        method = draw.choice(METHODS)
    if draw.random() < 0.1:
        path = draw.choice(PATHS)
    version = "HTTP/1.1" if draw.random() < 0.96 else draw.choice(VERSIONS)
    for _ in range(draw.choice((0, 0, 0, 1, 1, 3))):
        headers.insert(draw.randrange(len(headers) + 1), draw.choice(HEADERS))
    data = _encoded(draw, data, headers)
    length, data, waits = _framed(draw, data)
    line = f"{method} {path} {version}\r\n".encode("utf-8", "surrogatepass")
    if draw.random() < 0.5:  # some of the paths are bytes of no encoding
        line = line.replace("\xff".encode(), b"\xff").replace("\xfe".encode(), b"\xfe")
    head = b"\r\n".join([line[:-2], *headers, *length])
    whole = head + b"\r\n\r\n" + data
    if draw.random() < 0.03:
        whole, waits = torn(whole, draw), False
    # a server may read on after a head that it takes for another one
    return Hostile(_cut(draw, whole), method, waits and version == "HTTP/1.1")


def _body(draw: random.Random, body: object, model: str) -> bytes:
    value = deepcopy(body)
    for name in list(value):  # most fields left out, else one that is refused hides the rest
        if name not in KEPT and draw.random() < 0.7:
            del value[name]
    if "model" in value:
        value["model"] = model
    inner = value.get("parameters", {})
    for name in list(inner):
        if name not in KEPT and draw.random() < 0.6:
            del inner[name]
    if "stream" in value:
        value["stream"] = draw.random() < 0.5
    holes = []
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        _spoil(draw, value, holes)
    data = json.dumps(value, ensure_ascii=draw.random() < 0.7).encode("utf-8", "surrogatepass")
    for raw in holes:
        data = data.replace(json.dumps(HOLE).encode(), raw, 1)
    odd = draw.random()
    if odd < 0.02:
        data = torn(data, draw)
    elif odd < 0.03:
        data = draw.choice((b"", b"null", b"[]", b'"a"', b"1", b"\xef\xbb\xbf" + data, data + data))
    elif odd < 0.04:
        data = data.decode("utf-8", "replace").encode(draw.choice(("utf-16", "utf-32", "utf-7")))
    return data


def _spoil(draw: random.Random, value: object, holes: list[bytes]) -> None:
    """One wrong value, missing key or new key somewhere in a JSON object."""
    holder = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(holder[key], dict | list) or not holder[key] or draw.random() < 0.2:
            break
        holder = holder[key]
    kind = draw.random()
    if kind < 0.6:
        holder[key] = deepcopy(draw.choice(NASTY))
    elif kind < 0.85:
        holes.append(draw.choice(RAW))
        holder[key] = HOLE
    elif kind < 0.93 or isinstance(holder, list):
        del holder[key]
    else:
        holder[draw.choice(("x", "", "\x00", "\r\nX-Evil: 1", "é", "a" * 5000, "n"))] = 1


def _signed(draw: random.Random, path: str, data: bytes) -> list[bytes]:
    """AWS's headers for the request; one in three with a part changed."""
    request = AWSRequest("POST", f"http://{HOST.decode()}{path}", data=data)
    SigV4Auth(Credentials("AK", "SK"), "sagemaker", "eu-west-1").add_auth(request)
    headers = [f"{name}: {value}".encode() for name, value in request.headers.items()]
    headers.append(b"Host: " + HOST)
    if draw.random() < 0.3:
        at = draw.randrange(len(headers))
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(headers[at]))
            piece = draw.choice((b"\xff", b"", b"\xc3\xa9", b"/", b",", b"=", b";", b"a", b"Z"))
            headers[at] = headers[at][:place] + piece + headers[at][place + 1 :]
    return headers


def _encoded(draw: random.Random, data: bytes, headers: list[bytes]) -> bytes:
    """The body as its Content-Encoding says, mostly."""
    if draw.random() < 0.3:
        return data
    if b"Content-Encoding: gzip" in headers:
        return gzip.compress(data + b" " * draw.choice((0, 0, 10**6)), 1)
    return zlib.compress(data) if b"Content-Encoding: deflate" in headers else data


def _framed(draw: random.Random, data: bytes) -> tuple[list[bytes], bytes, bool]:
    """The headers of the length, the framed body, and whether its end can be seen."""
    right = b"Content-Length: %d" % len(data)
    kind = draw.random()
    if kind < 0.8:
        return [right], data, True
    if kind < 0.84:
        return [b"Content-Length: " + draw.choice(LENGTHS)], data, False
    if kind < 0.86:
        return [b"Content-Length: %d" % (len(data) + draw.choice((-3, 1, 100)))], data, False
    chunked = b"Transfer-Encoding: chunked"
    chunks, left = [], data
    while left:
        size = draw.choice((1, 7, 100, 5000))
        chunk, left = left[:size], left[size:]
        extension = draw.choice((b"", b"", b"", b";a=b", b";" + b"x" * 300, b" "))
        chunks.append(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk))
    trailer = draw.choice((b"", b"", b"X-T: 1\r\n", b"\xff: \x00\r\n", b"Content-Length: 3\r\n"))
    end = b"0\r\n" + trailer + b"\r\n"
    if kind < 0.93:
        return [chunked], b"".join(chunks) + end, True
    if kind < 0.95:
        return [chunked, right], b"".join(chunks) + end, False
    if kind < 0.97:
        return [chunked], b"".join(chunks), False
    bad = draw.choice((b"zz\r\n", b"-1\r\n", b"f" * 17 + b"\r\n", b"\r\n", b"5\r\nab", b"\xff"))
    return [chunked], b"".join(chunks) + bad + end, False


def _cut(draw: random.Random, data: bytes) -> tuple[bytes, ...]:
    """The bytes in one piece, or in two or three."""
    if draw.random() < 0.8 or len(data) < 3:
        return (data,)
    first, second = sorted(draw.sample(range(1, len(data)), 2))
    return data[:first], data[first:second], data[second:]
