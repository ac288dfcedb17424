"""The requests and routes of Text Generation Inference 3, with its defaults and errors.

As in TGI, `/` returns an array of one, or a stream if the body says so, with the prompt before the
text by default. A stream's status is sent before the request is queued, so every error, overload
included, is an event under 200, except for a malformed body. The stop sequence that ended an answer
is part of it, a special token shows its name but adds no text, and log-probabilities are the
model's own.

As in TGI, a malformed body is rejected with a status, and an out-of-range value with a validation
error, which a stream sends as an event.
Source: router/src/lib.rs and router/src/validation.rs of text-generation-inference 3.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from aiohttp import web

from lmi_bench import __version__
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.units import s_to_ms
from lmi_bench.engine.scheduling.sampling import MOST_TOP_LOGPROBS, SamplingParams
from lmi_bench.engine.server.answer import Answer, Codec, Piece, Prompt
from lmi_bench.engine.server.failures import FAILURES, json_response, tgi_failure, tgi_unhealthy
from lmi_bench.engine.server.fields import Fields, given, load_json_object
from lmi_bench.engine.server.state import MAX_STOP_STRINGS, ServerState
from lmi_bench.engine.server.streaming import complete_all, end_all, send_stream, submit_choices

MAX_BEST_OF: Final = 2
_SEED_BITS: Final = 63
_NUMBERS: Final = ("temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p")
_COUNTS: Final = ("best_of", "max_new_tokens", "truncate", "seed", "top_n_tokens")


@dataclass(frozen=True, slots=True)
class TgiLimits:
    """The limits that `/info` states and requests must meet, in tokens."""

    max_input_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class TgiBody:
    """A well-formed request whose values have not been checked.

    return_full_text  None: the path's default
    max_new_tokens    None: up to the end of the context
    unsupported       error message for a parameter that this server lacks
    ignored           fields without effect here
    """

    inputs: str
    stream: bool
    best_of: int | None
    temperature: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    top_k: int | None
    top_p: float | None
    typical_p: float | None
    do_sample: bool
    max_new_tokens: int | None
    return_full_text: bool | None
    stop: tuple[str, ...]
    truncate: int | None
    details: bool
    decoder_input_details: bool
    seed: int | None
    top_n_tokens: int | None
    unsupported: str | None
    ignored: list[str]

    @property
    def prefix(self) -> str:
        """Text before the generated text: the prompt, or empty."""
        return self.inputs if self.return_full_text else ""


def read_tgi_body(body: bytes) -> TgiBody:
    """Read a request. Raises InputError that names the malformed field."""
    top = Fields(load_json_object(body))
    inputs = top.raw("inputs")
    if not isinstance(inputs, str):
        raise InputError("inputs must be a string")
    parameters = top.section("parameters")
    numbers: dict[str, Any] = {name: parameters.number(name, None) for name in _NUMBERS}
    counts: dict[str, Any] = {name: parameters.integer(name, None, minimum=0) for name in _COUNTS}
    return TgiBody(
        inputs=inputs,
        stream=top.flag("stream", False),
        top_k=parameters.integer("top_k", None),
        # without `parameters` TGI samples; with any parameters it decodes greedily
        do_sample=parameters.flag("do_sample", top.raw("parameters") is None),
        return_full_text=parameters.flag("return_full_text", None),
        stop=parameters.strings("stop", at_most=sys.maxsize),  # limited in check_values
        details=parameters.flag("details", False),
        decoder_input_details=parameters.flag("decoder_input_details", False),
        unsupported=_unsupported(parameters),
        **numbers,
        **counts,
        ignored=top.unread() + parameters.unread(),
    )


def check_stream(body: TgiBody) -> None:
    """Raises InputError for settings that a stream does not support."""
    if body.best_of not in (None, 1):
        raise InputError("`best_of` != 1 is not supported when streaming tokens")
    if body.decoder_input_details:
        raise InputError("`decoder_input_details` == true is not supported when streaming tokens")


def num_answers(body: TgiBody) -> int:
    """Number of answers to generate for `best_of`. Raises InputError as TGI does."""
    count = given(body.best_of, 1)
    if count > MAX_BEST_OF:
        raise InputError(f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {count}")
    return max(1, count)


def check_values(body: TgiBody, limits: TgiLimits) -> None:
    """Raises InputError for out-of-range values, with TGI's messages and order."""
    drawn = (body.temperature, body.top_k, body.top_p, body.typical_p)
    wants_several = body.best_of is not None and body.best_of > 1
    truncate = body.truncate
    for refused, message in (
        (
            wants_several and not body.do_sample and all(value is None for value in drawn),
            "you must use sampling when `best_of` is > 1",
        ),
        (_not_above_0(body.temperature), "`temperature` must be strictly positive"),
        (_not_above_0(body.repetition_penalty), "`repetition_penalty` must be strictly positive"),
        (
            body.frequency_penalty is not None and not -2 <= body.frequency_penalty <= 2,
            "`frequency_penalty` must be >= -2.0 and <= 2.0",
        ),
        (_not_a_share(body.top_p), "`top_p` must be > 0.0 and < 1.0"),
        (_not_a_share(body.typical_p), "`typical_p` must be > 0.0 and < 1.0"),
        (_not_above_0(body.top_k), "`top_k` must be strictly positive"),
        (body.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"),
        (
            len(body.stop) > MAX_STOP_STRINGS,
            f"`stop` supports up to {MAX_STOP_STRINGS} stop sequences. Given: {len(body.stop)}",
        ),
        (wants_several and body.seed is not None, "`seed` must not be set when `best_of` > 1"),
        (
            (body.top_n_tokens or 0) > MOST_TOP_LOGPROBS,
            f"`top_n_tokens` must be >= 0 and <= {MOST_TOP_LOGPROBS}. Given: {body.top_n_tokens}",
        ),
        (not body.inputs, "`inputs` cannot be empty"),
        (
            truncate is not None and not 0 < truncate <= limits.max_input_tokens,
            f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. "
            f"Given: {truncate}",
        ),
        (body.unsupported is not None, body.unsupported),
        (
            body.decoder_input_details,
            "`decoder_input_details` is not supported by this server, which has no "
            "log-probabilities of prompts",
        ),
    ):
        if refused:
            raise InputError(message)


def read_length(body: TgiBody, num_inputs: int, limits: TgiLimits) -> int:
    """The output limit after `num_inputs` tokens. Raises CapacityError if they do not fit."""
    total, wanted = limits.max_total_tokens, body.max_new_tokens
    if wanted is None:
        wanted = max(0, total - num_inputs)
    if num_inputs + wanted > total:
        raise CapacityError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {num_inputs} `inputs` "
            f"tokens and {wanted} `max_new_tokens`"
        )
    if num_inputs > limits.max_input_tokens:
        raise CapacityError(
            f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {num_inputs}"
        )
    return wanted


def read_sampling(
    body: TgiBody, max_new_tokens: int, eos_token_ids: tuple[int, ...], *, logprobs: bool
) -> SamplingParams:
    """The sampling settings of a checked body.

    A temperature, top_k or top_p other than the default implies sampling, whatever `do_sample`
    says. Sampling without a seed gets a random one, so that the reply can state it.
    """
    temperature, top_p = given(body.temperature, 1.0), given(body.top_p, 1.0)
    top_k = body.top_k or 0
    sampled = body.do_sample or temperature != 1.0 or top_k > 0 or top_p < 1.0
    seed = None
    if sampled:
        seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        temperature=temperature if sampled else 0.0,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=given(body.repetition_penalty, 1.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        seed=seed,
        logprobs=logprobs,
        top_logprobs=(body.top_n_tokens or 0) if logprobs else 0,
    )


def _unsupported(parameters: Fields) -> str | None:
    """The error message for a parameter that this server does not support, if any."""
    found = None
    if parameters.raw("adapter_id") is not None:
        found = "`adapter_id` is not supported by this server, which has no adapters"
    if parameters.raw("grammar") is not None:
        found = "grammar is not supported"
    if parameters.flag("watermark", False):
        found = "`watermark` is not supported by this server"
    if parameters.raw("typical_p") not in (None, 1):
        found = "`typical_p` is not supported by this server"
    return found


def _not_above_0(value: float | None) -> bool:
    return value is not None and not value > 0


def _not_a_share(value: Any) -> bool:
    return value is not None and not 0 < value < 1


_INCOMPLETE_STREAM = {
    "error": "Incomplete generation stream",
    "error_type": "incomplete_generation_stream",
}


def event_of(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class TgiStreamReply:
    """One streamed answer."""

    def __init__(self, answer: Answer, codec: Codec, body: TgiBody) -> None:
        self._answer = answer
        self._codec = codec
        self._body = body
        self._num_sent = 0

    def events(self, pieces: list[Piece]) -> bytes:
        """One event per token; the last one has the whole text, and details if requested."""
        answer = self._answer
        events = b""
        for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
            self._num_sent += 1
            event: dict[str, Any] = {"index": self._num_sent, "token": token_of(piece, self._codec)}
            if piece.ranked:
                event["top_tokens"] = ranked_of(piece, self._codec)
            event |= {"generated_text": None, "details": None}
            if not left and answer.finish_reason is not None:
                event["generated_text"] = self._body.prefix + answer.text
                if self._body.details:
                    num_prompt = len(answer.prompt.token_ids)
                    event["details"] = _counts(answer) | {"input_length": num_prompt}
            events += event_of(event)
        if not pieces:  # stopped without a last token
            events = event_of(_INCOMPLETE_STREAM)
        return events


def whole_reply(answers: Sequence[Answer], codec: Codec, body: TgiBody) -> dict[str, Any]:
    """The reply with the most likely answer; the others are in its details."""
    best, *others = sorted(answers, key=_mean_logprob, reverse=True)
    reply: dict[str, Any] = {"generated_text": body.prefix + best.text}
    if body.details:
        reply["details"] = _details(best, codec)
        if others:
            reply["details"]["best_of_sequences"] = [
                {"generated_text": body.prefix + other.text, **_details(other, codec)}
                for other in others
            ]
    return reply


def token_of(piece: Piece, codec: Codec) -> dict[str, Any]:
    special = codec.special_token(piece.token_id)
    return {
        "id": piece.token_id,
        "text": piece.text if special is None else special,
        "logprob": piece.logprob,
        "special": special is not None,
    }


def ranked_of(piece: Piece, codec: Codec) -> list[dict[str, Any]]:
    """The most likely tokens at a token's position."""
    return [
        token_of(Piece(token_id, codec.decode([token_id]), logprob), codec)
        for token_id, logprob in piece.ranked
    ]


def _details(answer: Answer, codec: Codec) -> dict[str, Any]:
    tokens = [token_of(piece, codec) for piece in answer.pieces]
    details = _counts(answer) | {"prefill": [], "tokens": tokens}
    if answer.prompt.sampling.top_logprobs:
        details["top_tokens"] = [ranked_of(piece, codec) for piece in answer.pieces]
    return details


def _counts(answer: Answer) -> dict[str, Any]:
    """The details that streamed and whole answers share."""
    return {
        "finish_reason": answer.finish_reason,
        "generated_tokens": len(answer.pieces),
        "seed": answer.prompt.sampling.seed,
    }


def _mean_logprob(answer: Answer) -> float:
    """Mean natural log-probability of its tokens; 0 if none is known."""
    known = [piece.logprob for piece in answer.pieces if piece.logprob is not None]
    return sum(known) / len(known) if known else 0.0


ROUTER_NAME: Final = "lmi-bench"
"""`router` in `/info`; TGI's is `text-generation-router`, so clients can distinguish them."""
_UNLIMITED: Final = 2**31 - 1
_COMPUTE_TYPE: Final = "lmi-bench"


class TgiRoutes:
    """Handlers over one served model."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        config, total = state.engine.config, state.max_model_len
        longest = config.max_input_tokens or total - 1
        self._limits = TgiLimits(min(longest, total - 1), total)
        self._max_concurrent_requests = config.max_concurrent_requests or _UNLIMITED

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/", self.health)
        app.router.add_get("/health", self.health)
        app.router.add_get("/info", self.info)
        app.router.add_post("/", self.compat_generate)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/generate_stream", self.generate_stream)

    async def health(self, request: web.Request) -> web.Response:
        """200 without a body while the engine works, as in vLLM too; else 503."""
        if self._state.engine.error is None:
            return web.Response()
        return json_response(tgi_unhealthy(), status=503)

    async def info(self, request: web.Request) -> web.Response:
        return json_response(
            {
                "model_id": self._state.model_name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": self._max_concurrent_requests,
                "max_best_of": MAX_BEST_OF,
                "max_stop_sequences": MAX_STOP_STRINGS,
                "max_input_tokens": self._limits.max_input_tokens,
                "max_total_tokens": self._limits.max_total_tokens,
                "validation_workers": 1,
                "max_client_batch_size": 1,
                "router": ROUTER_NAME,
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The whole answer as one object."""
        body = read_tgi_body(await request.read())
        reply, headers = await self._whole(body)
        return json_response(reply, headers=headers)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """One event per token."""
        return await self._stream(request, read_tgi_body(await request.read()))

    async def compat_generate(self, request: web.Request) -> web.StreamResponse:
        """`/`: an array of one answer, or a stream."""
        body = read_tgi_body(await request.read())
        if body.return_full_text is None:
            body = replace(body, return_full_text=True)
        if body.stream:
            return await self._stream(request, body)
        reply, headers = await self._whole(body)
        return json_response([reply], headers=headers)

    async def _whole(self, body: TgiBody) -> tuple[dict[str, Any], dict[str, str]]:
        state, start_s = self._state, asyncio.get_running_loop().time()
        count = num_answers(body)
        prompt = await self._prompt(body, logprobs=body.details or count > 1)
        queued_s = asyncio.get_running_loop().time()
        answers = await submit_choices(state, prompt, count)
        try:
            await complete_all(answers)
            headers = _timing_headers(body, answers[0], start_s, queued_s)
            reply = whole_reply(answers, state.codec, body)
            return reply, headers | state.ignored_header(body.ignored)
        finally:
            end_all(state, answers)

    async def _stream(self, request: web.Request, body: TgiBody) -> web.StreamResponse:
        headers = {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "x-compute-type": _COMPUTE_TYPE,
            "x-compute-characters": str(len(body.inputs)),
            **self._state.ignored_header(body.ignored),
        }
        answers: list[Answer] = []
        try:
            return await send_stream(
                request, self._events(body, answers), headers=headers, headers_first=True
            )
        finally:
            end_all(self._state, answers)

    async def _events(self, body: TgiBody, answers: list[Answer]) -> AsyncIterator[bytes]:
        """Submit a request and yield its events; appends its answer to `answers` for cleanup."""
        try:
            check_stream(body)
            answer = self._state.submit(await self._prompt(body, logprobs=True))
            answers.append(answer)
            reply = TgiStreamReply(answer, self._state.codec, body)
            async for pieces in answer.chunks():
                yield reply.events(pieces)
        except FAILURES as exc:
            _, error = tgi_failure(exc)
            yield event_of(error)

    async def _prompt(self, body: TgiBody, *, logprobs: bool) -> Prompt:
        check_values(body, self._limits)
        state = self._state
        token_ids = await state.encode(body.inputs, body.truncate)
        max_new_tokens = read_length(body, len(token_ids), self._limits)
        sampling = read_sampling(body, max_new_tokens, state.codec.eos_token_ids, logprobs=logprobs)
        return Prompt(token_ids, sampling, body.stop, keep_stop_string=True)


def _timing_headers(
    body: TgiBody, answer: Answer, start_s: float, queued_s: float
) -> dict[str, str]:
    """A request's timings, in whole milliseconds except x-compute-time, which is in seconds."""
    total_s = asyncio.get_running_loop().time() - start_s
    queue_s = answer.generation.queue_s or 0.0
    inference_s = max(0.0, total_s - (queued_s - start_s) - queue_s)
    num_tokens = len(answer.pieces)
    return {
        "x-compute-type": _COMPUTE_TYPE,
        "x-compute-time": f"{total_s:.9g}",
        "x-compute-characters": str(len(body.inputs)),
        "x-total-time": _ms(total_s),
        "x-validation-time": _ms(queued_s - start_s),
        "x-queue-time": _ms(queue_s),
        "x-inference-time": _ms(inference_s),
        "x-time-per-token": _ms(inference_s / max(1, num_tokens)),
        "x-prompt-tokens": str(len(answer.prompt.token_ids)),
        "x-generated-tokens": str(num_tokens),
    }


def _ms(seconds: float) -> str:
    return str(int(s_to_ms(seconds)))
