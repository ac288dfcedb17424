"""Encodes answers in either of LMI's two reply formats.

rolling  djl-serving 0.27 to 0.34, and later rolling batches: `token.log_prob`, one line per token
async    the default since 0.35, with vLLM: `token.logprob`, one line per engine event
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from lmi_bench.core.errors import EngineError
from lmi_bench.core.units import s_to_ms
from lmi_bench.engine.async_engine import Generation
from lmi_bench.engine.server.answer import Answer, Piece, openai_finish_reason
from lmi_bench.engine.server.failures import lmi_failure
from lmi_bench.engine.server.formatters import NO_FORMATTERS, Formatters
from lmi_bench.engine.server.lmi_request import LmiCall
from lmi_bench.engine.server.state import ServerState

_FINISH_REASONS = {"cancelled": "abort"}  # all others have the same name in LMI


class RollingBatchReply:
    """One answer in the rolling-batch format: one line per token."""

    def __init__(
        self,
        call: LmiCall,
        answer: Answer,
        state: ServerState,
        formatters: Formatters = NO_FORMATTERS,
    ) -> None:
        self._call = call
        self._answer = answer
        self._model_name = state.model_name
        self._formatters = formatters
        self._codec = state.codec
        self._eos_token_ids = state.codec.eos_token_ids

    def lines(self, pieces: list[Piece]) -> bytes:
        """One line per token, even if its text is empty; the last one ends the answer."""
        lines: list[dict[str, Any]] = [{"token": self._token(piece)} for piece in pieces]
        if self._answer.finish_reason is not None:
            if not lines:  # stopped before its first token
                lines = [{"token": {"id": -1, "text": "", "log_prob": None}}]
            lines[-1] |= {"generated_text": self._generated_text()}
            if self._call.details:
                lines[-1] |= {"details": self._details()}
        return b"".join([self._line(line) for line in lines])

    def end(self) -> bytes:
        """Bytes after the last line."""
        return b""

    def failure_line(self, exc: EngineError) -> bytes:
        """The line that ends a stream (status 200 already sent) when the engine fails."""
        _, body = lmi_failure(exc, self._model_name)
        return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)

    def whole(self) -> dict[str, Any]:
        """The body of an unstreamed reply."""
        body: dict[str, Any] = {"generated_text": self._generated_text()}
        if self._call.details:
            body["details"] = self._unstreamed_details()
        return self._formatters.reply(body)

    def _unstreamed_details(self) -> dict[str, Any]:
        pieces = self._answer.pieces
        details = self._details() | {"tokens": [self._token(piece) for piece in pieces]}
        if self._call.sampling.top_logprobs:
            details["top_tokens"] = [self._ranked(piece) for piece in pieces]
        return details

    def _ranked(self, piece: Piece) -> list[dict[str, Any]]:
        return [
            {"id": token_id, "text": self._codec.decode([token_id]), "log_prob": logprob}
            for token_id, logprob in piece.ranked
        ]

    def _line(self, line: dict[str, Any]) -> bytes:
        return orjson.dumps(self._formatters.reply(line), option=orjson.OPT_APPEND_NEWLINE)

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


class AsyncReply(RollingBatchReply):
    """One answer in the async-mode format: one line per engine event.

    As in LMI, only an event's first token has its id, a stream counts one token too many and ends
    with two blank lines, and an unstreamed `finish_reason` is null except for a stop string.
    """

    def lines(self, pieces: list[Piece]) -> bytes:
        """One line with the text of all its tokens."""
        first = pieces[0] if pieces else Piece(-1, "", None)
        text = "".join([piece.text for piece in pieces])
        ended = self._answer.finish_reason is not None
        line = {
            "index": 0,
            "token": {"id": first.token_id, "text": text, "logprob": first.logprob},
            "generated_text": self._generated_text() if ended else None,
            "details": self._streamed_details() if ended and self._call.details else None,
        }
        return self._line(line)

    def end(self) -> bytes:
        """Blank lines, in place of vLLM's usage chunk and end marker."""
        return b"\n\n"

    def _unstreamed_details(self) -> dict[str, Any]:
        return {
            "finish_reason": self._answer.stop_string,
            "generated_tokens": len(self._answer.pieces),
            "seed": self._call.sampling.seed,
            "prefill": [],
            "tokens": [
                {"id": piece.token_id, "text": piece.text, "logprob": piece.logprob}
                for piece in self._answer.pieces
            ],
        }

    def _streamed_details(self) -> dict[str, Any]:
        return {
            "finish_reason": openai_finish_reason(self._answer.finish_reason),
            "seed": self._call.sampling.seed,
            "generated_tokens": len(self._answer.pieces) + 1,
            "input_length": len(self._answer.prompt.token_ids),
        }


LMI_REPLIES: Mapping[str, type[RollingBatchReply]] = {
    "rolling": RollingBatchReply,
    "async": AsyncReply,
}


def _engine_details(generation: Generation) -> dict[str, Any]:
    """This engine's additions: time per phase, and speculation counts."""
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
