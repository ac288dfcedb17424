"""The routes of Text Generation Inference 3: `/generate`, `/generate_stream`, `/`, `/info`, health.

As in TGI, `/` returns an array of one, or a stream if the body says so, with the prompt before the
text by default. A stream's status is sent before the request is queued, so every error, overload
included, is an event under 200, except for a malformed body. The stop sequence that ended an answer
is part of it, a special token shows its name but adds no text, and log-probabilities are the
model's own.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import web

from lmi_bench import __version__
from lmi_bench.core.errors import drop_frames
from lmi_bench.core.units import s_to_ms
from lmi_bench.engine.server import streaming
from lmi_bench.engine.server.answer import Answer, Piece, Prompt
from lmi_bench.engine.server.codec import Codec
from lmi_bench.engine.server.failures import FAILURES, failure, json_response
from lmi_bench.engine.server.state import MAX_STOP_STRINGS, ServerState
from lmi_bench.engine.server.tgi_request import (
    MAX_BEST_OF,
    TgiBody,
    TgiCompatBody,
    check_values,
    read_length,
    read_sampling,
)

_INCOMPLETE_STREAM = {"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"}


def event_of(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


@dataclass(slots=True)
class TgiStreamReply:
    """One streamed answer, or an event that says why there is none."""

    answers: Sequence[Answer]
    codec: Codec
    body: TgiBody
    refusal: bytes = b""
    num_sent: int = 0

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """One event per token; the last one has the whole text, and details if requested."""
        answer = self.answers[number]
        events = b""
        for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
            self.num_sent += 1
            event: dict[str, Any] = {"index": self.num_sent, "token": token_of(piece, self.codec)}
            if piece.ranked:
                event["top_tokens"] = ranked_of(piece, self.codec)
            event |= {"generated_text": None, "details": None}
            if not left and answer.finish_reason is not None:
                event["generated_text"] = self.body.prefix + answer.text
                if self.body.parameters.details:
                    num_prompt = len(answer.prompt.token_ids)
                    event["details"] = _counts(answer) | {"input_length": num_prompt}
            events += event_of(event)
        if not pieces:  # stopped without a last token
            events = event_of(_INCOMPLETE_STREAM)
        return events

    def end(self) -> bytes:
        return self.refusal

    def failure(self, exc: Exception) -> bytes:
        _, error = failure("tgi", exc)
        return event_of(error)


def whole_reply(answers: Sequence[Answer], codec: Codec, body: TgiBody) -> dict[str, Any]:
    """The reply with the most likely answer; the others are in its details."""
    best, *others = sorted(answers, key=_mean_logprob, reverse=True)
    reply: dict[str, Any] = {"generated_text": body.prefix + best.text}
    if body.parameters.details or body.parameters.decoder_input_details:
        reply["details"] = _details(best, codec)
        if others:
            reply["details"]["best_of_sequences"] = [
                {"generated_text": body.prefix + other.text, **_details(other, codec)} for other in others
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
    return [token_of(Piece(token_id, codec.decode([token_id]), logprob), codec) for token_id, logprob in piece.ranked]


def _details(answer: Answer, codec: Codec) -> dict[str, Any]:
    tokens = [token_of(piece, codec) for piece in answer.pieces]
    read = [token_of(piece, codec) for piece in answer.prompt_pieces(codec)]
    prefill = [{key: each[key] for key in ("id", "text", "logprob")} for each in read]
    details = _counts(answer) | {"prefill": prefill, "tokens": tokens}
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
        longest = state.max_model_len - 1  # of a prompt, in tokens
        self._longest = min(state.engine.config.max_input_tokens or longest, longest)

    async def health(self, request: web.Request) -> web.Response:
        """200 without a body while the engine works, as in vLLM too; else 503."""
        if self._state.engine.error is None:
            return web.Response()
        return json_response({"error": "unhealthy", "error_type": "healthcheck"}, status=503)

    async def info(self, request: web.Request) -> web.Response:
        limit = self._state.engine.config.max_concurrent_requests
        return json_response(
            {
                "model_id": self._state.model_name,
                **dict.fromkeys(("model_sha", "sha", "docker_label")),
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": limit or _UNLIMITED,
                "max_best_of": MAX_BEST_OF,
                "max_stop_sequences": MAX_STOP_STRINGS,
                "max_input_tokens": self._longest,
                "max_total_tokens": self._state.max_model_len,
                "validation_workers": 1,
                "max_client_batch_size": 1,
                "router": ROUTER_NAME,
                "version": __version__,
            }
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._whole(TgiBody.read(await request.read()))

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, TgiBody.read(await request.read()))

    async def compat_generate(self, request: web.Request) -> web.StreamResponse:
        """`/`: an array of one answer, or a stream."""
        body = TgiCompatBody.read(await request.read())
        if body.stream:
            return await self._stream(request, body)
        return await self._whole(body, in_array=True)

    async def _whole(self, body: TgiBody, *, in_array: bool = False) -> web.Response:
        state, start_s = self._state, asyncio.get_running_loop().time()
        count = body.parameters.best_of or 1
        detailed = body.parameters.details or body.parameters.decoder_input_details
        prompt = await self._prompt(body, "whole", logprobs=detailed or count > 1)
        queued_s = asyncio.get_running_loop().time()
        answers = await streaming.submit_choices(state, prompt, count)
        try:
            await streaming.complete_all(answers)
            total_s = asyncio.get_running_loop().time() - start_s
            reply = whole_reply(answers, state.codec, body)
            queue_s, num_tokens = answers[0].generation.queue_s or 0.0, len(answers[0].pieces)
            inference_s = max(0.0, total_s - (queued_s - start_s) - queue_s)
            headers = {  # in whole milliseconds except x-compute-time, which is in seconds
                "x-compute-type": _COMPUTE_TYPE,
                "x-compute-time": f"{total_s:.9g}",
                "x-compute-characters": str(len(body.inputs)),
                "x-total-time": _ms(total_s),
                "x-validation-time": _ms(queued_s - start_s),
                "x-queue-time": _ms(queue_s),
                "x-inference-time": _ms(inference_s),
                "x-time-per-token": _ms(inference_s / max(1, num_tokens)),
                "x-prompt-tokens": str(len(prompt.token_ids)),
                "x-generated-tokens": str(num_tokens),
                **state.ignored_header(body.ignored),
            }
            return json_response([reply] if in_array else reply, headers=headers)
        finally:
            streaming.end_all(state, answers)

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
        reply = TgiStreamReply(answers, self._state.codec, body)
        try:
            try:
                prompt = await self._prompt(body, "stream", logprobs=True)
                answers.append(self._state.submit(prompt))
            except FAILURES as exc:
                drop_frames(exc)
                reply.refusal = reply.failure(exc)
            return await streaming.send_stream(
                self._state, request, answers, reply, headers=headers, headers_first=True
            )
        finally:
            streaming.end_all(self._state, answers)

    async def _prompt(self, body: TgiBody, reply: str, *, logprobs: bool) -> Prompt:
        check_values(body, self._longest, reply)
        state, asked = self._state, body.parameters
        token_ids = await state.encode(body.inputs, asked.truncate)
        sizes = (len(token_ids), self._longest, state.max_model_len)
        length = read_length(asked.max_new_tokens, *sizes)
        sampling = read_sampling(asked, length, state.codec.eos_token_ids, logprobs=logprobs)
        return Prompt(token_ids, sampling, asked.stop, keep_stop_string=True)


def _ms(seconds: float) -> str:
    return str(int(s_to_ms(seconds)))
