"""The LMI routes: `/ping`, `/invocations` and `/predictions/{model}`.

The shapes are those of djl-serving 0.27 to 0.34 (rolling batch, `token.log_prob`), the last in
which LMI had a format of its own; later versions stream vLLM's under the same path.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from lmi_bench.engine.async_engine import Generation
from lmi_bench.engine.server.answer import Answer, Piece, Prompt
from lmi_bench.engine.server.failures import UnknownModelError, json_response, lmi_failure
from lmi_bench.engine.server.lmi_request import LmiCall, read_lmi_call
from lmi_bench.engine.server.state import ServerState
from lmi_bench.engine.server.streaming import send_stream
from lmi_bench.errors import EngineError
from lmi_bench.units import s_to_ms

_FINISH_REASONS = {"cancelled": "abort"}  # the engine's other words are LMI's own


class LmiRoutes:
    """Handlers over one served model."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_route("GET", "/ping", self.ping)
        app.router.add_route("POST", "/ping", self.ping)
        app.router.add_post("/invocations", self.invocations)
        app.router.add_post("/predictions/{model}", self.predictions)

    async def ping(self, request: web.Request) -> web.Response:
        """200 while the engine can answer, else 500."""
        if self._state.engine.error is not None:
            return json_response({"status": "Unhealthy"}, status=500)
        return json_response({"status": "Healthy"})

    async def predictions(self, request: web.Request) -> web.StreamResponse:
        """`/invocations` under the model's name."""
        model = request.match_info["model"]
        if model != self._state.model_name:
            raise UnknownModelError(
                f"model {model!r} is not served here: use {self._state.model_name!r}"
            )
        return await self.invocations(request)

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """Generate text, at once or as a stream of JSON lines."""
        state = self._state
        call = read_lmi_call(await request.read(), state.codec.eos_token_ids)
        token_ids = await state.encode(call.inputs)
        if call.truncate is not None:
            token_ids = token_ids[-call.truncate :]
        answer = state.submit(Prompt(token_ids, call.sampling, call.stop_strings))
        try:
            headers = state.ignored_header(call.ignored)
            reply = _Reply(call, answer, state)
            if call.stream:
                return await send_stream(
                    request,
                    answer,
                    headers={"Content-Type": "application/jsonlines", **headers},
                    encode_chunk=reply.lines,
                    encode_end=bytes,
                    encode_failure=reply.failure_line,
                )
            await answer.complete()
            return json_response(reply.whole(), headers=headers)
        finally:
            answer.close()
            state.count(answer)


class _Reply:
    """One answer in LMI's words."""

    def __init__(self, call: LmiCall, answer: Answer, state: ServerState) -> None:
        self._call = call
        self._answer = answer
        self._model_name = state.model_name
        self._eos_token_ids = state.codec.eos_token_ids

    def lines(self, pieces: list[Piece]) -> bytes:
        """One line a token, empty texts included; the last one ends the answer."""
        lines: list[dict[str, Any]] = [{"token": self._token(piece)} for piece in pieces]
        if self._answer.finish_reason is not None:
            if not lines:  # stopped from outside before its first token
                lines = [{"token": {"id": -1, "text": "", "log_prob": None}}]
            lines[-1] |= {"generated_text": self._generated_text()}
            if self._call.details:
                lines[-1] |= {"details": self._details()}
        return b"".join([orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines])

    def failure_line(self, exc: EngineError) -> bytes:
        """The line that ends a stream under status 200 when the engine fails."""
        _, body = lmi_failure(exc, self._model_name)
        return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)

    def whole(self) -> dict[str, Any]:
        """The body of an unstreamed reply."""
        body: dict[str, Any] = {"generated_text": self._generated_text()}
        if self._call.details:
            body["details"] = self._details() | {
                "tokens": [self._token(piece) for piece in self._answer.pieces]
            }
        return body

    def _token(self, piece: Piece) -> dict[str, Any]:
        token: dict[str, Any] = {
            "id": piece.token_id,
            "text": piece.text,
            "log_prob": piece.logprob,
        }
        if piece.token_id in self._eos_token_ids:
            token["special_token"] = True
        return token

    def _generated_text(self) -> str:
        text = self._answer.text
        return self._call.inputs + text if self._call.return_full_text else text

    def _details(self) -> dict[str, Any]:
        reason = self._answer.finish_reason or "error"
        return {
            "finish_reason": _FINISH_REASONS.get(reason, reason),
            "generated_tokens": len(self._answer.pieces),
            "inputs": self._call.inputs,
            "engine": _engine_details(self._answer.generation),
        }


def _engine_details(generation: Generation) -> dict[str, Any]:
    """What only this engine can say: where the time went, and what speculation gave."""
    details: dict[str, Any] = {
        f"{name}_ms": None if seconds is None else s_to_ms(seconds)
        for name, seconds in (
            ("queue", generation.queue_s),
            ("prefill", generation.prefill_s),
            ("decode", generation.decode_s),
        )
    }
    if generation.drafted_tokens:
        details["drafted_tokens"] = generation.drafted_tokens
        details["accepted_tokens"] = generation.accepted_tokens
    return details
