"""The OpenAI routes: `/v1/completions`, `/v1/models` and `/health`, as vLLM answers them."""

from __future__ import annotations

import uuid
from typing import Any

import orjson
from aiohttp import web

from lmi_bench.engine.server.answer import Answer, Piece, Prompt
from lmi_bench.engine.server.failures import UnknownModelError, json_response, openai_failure
from lmi_bench.engine.server.openai_request import CompletionCall, read_completion_call
from lmi_bench.engine.server.state import ServerState, openai_finish_reason
from lmi_bench.engine.server.streaming import send_stream
from lmi_bench.errors import EngineError

_DONE = b"data: [DONE]\n\n"


class OpenAiRoutes:
    """Handlers over one served model."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine can answer, else 503; no body."""
        return web.Response(status=200 if self._state.engine.error is None else 503)

    async def models(self, request: web.Request) -> web.Response:
        """The one model that is served."""
        state = self._state
        model = {
            "id": state.model_name,
            "object": "model",
            "created": state.created,
            "owned_by": "lmi-bench",
            "root": state.model_name,
            "parent": None,
            "max_model_len": state.max_model_len,
        }
        return json_response({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Generate text, at once or as server-sent events."""
        state = self._state
        call = read_completion_call(await request.read(), state.codec.eos_token_ids)
        if call.model is not None and call.model != state.model_name:
            raise UnknownModelError(
                f"The model `{call.model}` does not exist: this server has `{state.model_name}`"
            )
        token_ids = await self._token_ids(call)
        answer = state.submit(Prompt(token_ids, call.sampling, call.stop_strings))
        try:
            headers = state.ignored_header(call.ignored)
            reply = _Reply(call, answer, state, num_prompt_tokens=len(token_ids))
            if call.stream:
                return await send_stream(
                    request,
                    answer,
                    headers={
                        "Content-Type": "text/event-stream; charset=utf-8",
                        "Cache-Control": "no-cache",
                        **headers,
                    },
                    encode_chunk=reply.event,
                    encode_end=reply.last_events,
                    encode_failure=reply.failure_events,
                )
            await answer.complete()
            return json_response(reply.whole(), headers=headers)
        finally:
            answer.close()
            state.count(answer)

    async def _token_ids(self, call: CompletionCall) -> list[int]:
        if isinstance(call.prompt, str):
            token_ids = await self._state.encode(call.prompt)
        else:
            token_ids = call.prompt
            self._state.check_token_ids(token_ids)
        return token_ids if call.truncate is None else token_ids[-call.truncate :]


class _Reply:
    """One answer in OpenAI's words."""

    def __init__(
        self, call: CompletionCall, answer: Answer, state: ServerState, *, num_prompt_tokens: int
    ) -> None:
        self._call = call
        self._answer = answer
        self._eos_token_ids = state.codec.eos_token_ids
        self._decode_one = state.codec.decode
        self._num_prompt_tokens = num_prompt_tokens
        self._text_offset = 0
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": state.created,
            "model": state.model_name,
        }
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":'

    def event(self, pieces: list[Piece]) -> bytes:
        """One chunk for one engine event, also where it adds no text."""
        choices = [self._choice("".join([piece.text for piece in pieces]), pieces)]
        tail = b"}\n\n"
        if self._call.continuous_usage:
            tail = b',"usage":' + orjson.dumps(self._usage()) + tail
        return self._prefix + orjson.dumps(choices) + tail

    def last_events(self) -> bytes:
        """The usage chunk, if it was asked for, and the end mark."""
        if not self._call.include_usage:
            return _DONE
        usage = orjson.dumps(self._usage())
        return self._prefix + b'[],"usage":' + usage + b"}\n\n" + _DONE

    def failure_events(self, exc: EngineError) -> bytes:
        """The event that ends a stream under status 200 when the engine fails."""
        _, body = openai_failure(exc)
        return b"data: " + orjson.dumps(body) + b"\n\n" + _DONE

    def whole(self) -> dict[str, Any]:
        """The body of an unstreamed reply."""
        choice = self._choice(self._answer.text, self._answer.pieces)
        return self._head | {"choices": [choice], "usage": self._usage()}

    def _choice(self, text: str, pieces: list[Piece]) -> dict[str, Any]:
        reason = self._answer.finish_reason
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(pieces) if self._call.logprobs else None,
            "finish_reason": None if reason is None else openai_finish_reason(self._answer),
            "stop_reason": None if reason != "stop_sequence" else self._stop_reason(),
        }
        if self._call.return_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
        return choice

    def _stop_reason(self) -> str | int | None:
        """The stop string, or the stop token's id."""
        if self._answer.stop_string is not None or not self._answer.pieces:
            return self._answer.stop_string
        return self._answer.pieces[-1].token_id

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        """vLLM's object; each token's own text, whatever part of it the answer shows already."""
        tokens = [self._decode_one([piece.token_id]) for piece in pieces]
        offsets = []
        for piece in pieces:
            offsets.append(self._text_offset)
            self._text_offset += len(piece.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [piece.logprob for piece in pieces],
            "tokens": tokens,
            "top_logprobs": [
                {token: piece.logprob} for token, piece in zip(tokens, pieces, strict=True)
            ],
        }

    def _usage(self) -> dict[str, int]:
        num_output_tokens = len(self._answer.pieces)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
        }
