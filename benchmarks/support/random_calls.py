"""Random requests for a server, good and bad, in every protocol that it speaks.

One draw fixes everything, so a seed names the whole load. About a third of the requests are wrong
in some way; about one in eight is given up by its client.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

ANSWERED_OR_REFUSED = frozenset({200, 400, 404, 405, 413, 422, 424, 429, 503})
"""Statuses that a server may give these requests; 424 is SageMaker's word for a refusal, 422 and
429 are TGI's."""

JUNK = (None, True, -1, 0, 2**40, 2**70, 1.5, "", "x", [], [""], [1, "a"], {}, {"a": 1}, "\x00é日")


@dataclass(frozen=True, slots=True)
class Lengths:
    """What prompts and answers are drawn from: words (tokens of a plain tokenizer) and tokens."""

    words: tuple[int, ...] = (1, 3, 3, 20, 40, 60, 100, 140, 200, 5000)
    tokens: tuple[int, ...] = (1, 2, 7, 20, 30, 60, 150)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `patience_s`: its client leaves after that long; None: it waits.

    cut  send only part of the bytes, then close the connection
    """

    path: str
    body: bytes
    patience_s: float | None = None
    cut: bool = False


def is_overloaded(status: int, body: bytes) -> bool:
    """Whether a call was refused for want of room, in any of the protocols."""
    if status in (429, 503) or b'"OriginalStatusCode":503' in body:
        return True
    return body.startswith(b"data: ") and b'"error_type":"overloaded"' in body


def is_answered(status: int, body: bytes) -> bool:
    """Whether it was not refused; TGI refuses a stream by an event under 200."""
    return status == 200 and not body.startswith(b'data: {"error":')


def random_call(draw: random.Random, lengths: Lengths, *, model: str = "toy") -> Call:
    """The next request of a draw."""
    path, body = _body(draw, lengths, model)
    raw = json.dumps(body).encode()
    if draw.random() < 0.05:
        raw = raw[: draw.randrange(len(raw))]
    if draw.random() < 0.05:
        path = draw.choice(("/predictions/other", "/nowhere", "/v1/nowhere", "/ping"))
    patience_s = draw.uniform(0, 0.1) if draw.random() < 0.12 else None
    return Call(path, raw, patience_s, cut=draw.random() < 0.03)


def _body(draw: random.Random, lengths: Lengths, model: str) -> tuple[str, dict[str, Any]]:
    num_words = draw.choice(lengths.words)
    text = " ".join(["word"] * num_words)
    length = draw.choice(lengths.tokens)
    parameters = {"ignore_eos": draw.random() < 0.5, "temperature": draw.choice((0, 0.7, 1)), "seed": draw.randrange(9)}
    stop = draw.choice((None, None, None, [" t1001"], ["t10", " t2"], ["zzz"]))
    stream = draw.random() < 0.6
    inner: dict[str, Any]
    if draw.random() < 0.15:
        path = draw.choice(("/generate", "/generate_stream", "/"))
        inner = {"max_new_tokens": length, "details": True, "stop": stop or []}
        inner |= {"do_sample": draw.random() < 0.5, "best_of": draw.choice((None, None, 1, 2))}
        body = {"inputs": text, "parameters": inner, "stream": stream}
        if draw.random() < 0.25:
            inner[draw.choice((*inner, "top_k", "truncate", "seed"))] = draw.choice(JUNK)
        return path, body
    if draw.random() < 0.5:
        path = draw.choice(("/invocations", "/invocations", f"/predictions/{model}"))
        parameters |= {"max_new_tokens": length, "details": True, "stop_sequences": stop}
        body = {"inputs": text, "parameters": parameters, "stream": stream}
        inner = parameters
    else:
        path = "/v1/completions"
        prompt = text if draw.random() < 0.5 else list(range(num_words))
        body = {"prompt": prompt, "max_tokens": length, "stop": stop, "stream": stream}
        body |= parameters | {"stream_options": {"include_usage": True}}
        body |= {"n": draw.choice((1, 1, 1, 2, 3)), "echo": draw.random() < 0.2}
        body |= {"presence_penalty": draw.choice((0, 0, 1)), "frequency_penalty": 0}
        if draw.random() < 0.3:
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": text}], "top_logprobs": 0}
            del body["prompt"], body["echo"]
        inner = body
    if draw.random() < 0.25:
        field = draw.choice((*inner, "new\nfield", "n", "min_tokens", "logprobs"))
        inner[field] = draw.choice(JUNK)
    if draw.random() < 0.2:
        path = "/endpoints/any/invocations" + ("-response-stream" if stream else "")
    return path, body
