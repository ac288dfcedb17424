"""Encodes answers in TGI's format: one event per token, or one object with details.

As in TGI, the stop sequence that ended an answer is part of it, a special token shows its name but
adds no text, and log-probabilities are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from lmi_bench.engine.server.answer import Answer, Piece
from lmi_bench.engine.server.codec import Codec

_INCOMPLETE_STREAM = {
    "error": "Incomplete generation stream",
    "error_type": "incomplete_generation_stream",
}


def event_of(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class TgiStreamReply:
    """One streamed answer."""

    def __init__(self, answer: Answer, codec: Codec, *, full_text: str, details: bool) -> None:
        """full_text  text before the generated text: the prompt, or empty"""
        self._answer = answer
        self._codec = codec
        self._full_text = full_text
        self._details = details
        self._num_sent = 0

    def events(self, pieces: list[Piece]) -> bytes:
        """One event per token; the last one has the whole text, and details if requested."""
        answer = self._answer
        events = b""
        for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
            self._num_sent += 1
            event: dict[str, Any] = {
                "index": self._num_sent,
                "token": token_of(piece, self._codec),
            }
            if piece.ranked:
                event["top_tokens"] = ranked_of(piece, self._codec)
            event |= {"generated_text": None, "details": None}
            if not left and answer.finish_reason is not None:
                event["generated_text"] = self._full_text + answer.text
                if self._details:
                    event["details"] = self._stream_details()
            events += event_of(event)
        if not pieces:  # stopped without a last token
            events = event_of(_INCOMPLETE_STREAM)
        return events

    def _stream_details(self) -> dict[str, Any]:
        prompt = self._answer.prompt
        return {
            "finish_reason": self._answer.finish_reason,
            "generated_tokens": len(self._answer.pieces),
            "seed": prompt.sampling.seed,
            "input_length": len(prompt.token_ids),
        }


def whole_reply(
    answers: Sequence[Answer], codec: Codec, *, full_text: str, details: bool
) -> dict[str, Any]:
    """The body with the most likely answer; the others are in its details."""
    best, *others = sorted(answers, key=_mean_logprob, reverse=True)
    body: dict[str, Any] = {"generated_text": full_text + best.text}
    if details:
        body["details"] = _details(best, codec)
        if others:
            body["details"]["best_of_sequences"] = [
                {"generated_text": full_text + other.text, **_details(other, codec)}
                for other in others
            ]
    return body


def token_of(piece: Piece, codec: Codec) -> dict[str, Any]:
    """A token in TGI's format."""
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
    details: dict[str, Any] = {
        "finish_reason": answer.finish_reason,
        "generated_tokens": len(answer.pieces),
        "seed": answer.prompt.sampling.seed,
        "prefill": [],
        "tokens": [token_of(piece, codec) for piece in answer.pieces],
    }
    if answer.prompt.sampling.top_logprobs:
        details["top_tokens"] = [ranked_of(piece, codec) for piece in answer.pieces]
    return details


def _mean_logprob(answer: Answer) -> float:
    """Mean natural log-probability of its tokens; 0 if none is known."""
    known = [piece.logprob for piece in answer.pieces if piece.logprob is not None]
    return sum(known) / len(known) if known else 0.0
