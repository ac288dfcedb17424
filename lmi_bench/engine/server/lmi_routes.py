"""The LMI routes: `/ping`, and an LMI body on `/invocations`, with each reply format.

batched  without a rolling batch: a list of texts, one for each of `inputs`, a string or a list
rolling  djl-serving 0.27 to 0.34, and later rolling batches: `token.log_prob`, one line per token
async    the default since 0.35, with vLLM: `token.logprob`, one line per engine event
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from aiohttp import web
from pydantic import AliasChoices, Field, NonNegativeInt, PlainValidator

from lmi_bench.core.errors import EngineError
from lmi_bench.core.units import s_to_ms
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server import fields, streaming
from lmi_bench.engine.server.answer import Answer, Piece, Prompt, openai_finish_reason
from lmi_bench.engine.server.failures import failure, json_response
from lmi_bench.engine.server.formatters import NO_FORMATTERS, Formatters
from lmi_bench.engine.server.state import ServerState


class LmiParameters(fields.VllmFields):
    """The fields of `parameters`.

    do_sample         None: a temperature, top_k or top_p implies it, as in LMI since 0.32
    truncate          keep only this many tokens at the prompt's end
    return_full_text  put the prompt before the generated text
    """

    max_new_tokens: int = 30
    min_tokens: NonNegativeInt = Field(0, validation_alias=AliasChoices("min_tokens", "min_new_tokens"))
    ignore_eos: bool = Field(False, validation_alias=AliasChoices("ignore_eos", "ignore_eos_token"))
    stop_sequences: fields.StopStrings = ()
    do_sample: bool | None = None
    details: bool = False
    return_full_text: bool = False
    top_n_tokens: NonNegativeInt = 0
    truncate: fields.AtLeast1 | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        sent = self.model_fields_set & {"temperature", "top_k", "top_p"}
        implied = any(getattr(self, name) for name in sent)
        return implied if self.do_sample is None else self.do_sample

    @property
    def ignored(self) -> list[str]:
        unused = self.do_sample is False and "temperature" in self.model_fields_set
        return super().ignored + ["temperature"] * unused


def _text(inputs: Any) -> str:
    if not isinstance(inputs, str) or not inputs:
        raise ValueError("a non-empty string (a list needs dynamic batching)")
    return inputs


class LmiCall(fields.Fields):
    """One `/invocations` request."""

    section = "parameters"
    inputs: Annotated[str, PlainValidator(_text)] = Field("", validate_default=True)
    parameters: LmiParameters = LmiParameters()
    stream: bool = False

    def sampling(self, eos_token_ids: tuple[int, ...]) -> SamplingParams:
        """The engine's settings. Raises InputError for a value out of range."""
        asked = self.parameters
        return asked.sampling_with(
            0 if self.stream else asked.top_n_tokens if asked.details else None,
            max_new_tokens=asked.max_new_tokens,
            eos_token_ids=eos_token_ids,
            temperature=asked.temperature if asked.samples else 0.0,
        )


_FINISH_REASONS = {"cancelled": "abort"}  # all others have the same name in LMI


@dataclass(frozen=True, slots=True)
class RollingBatchReply:
    """One answer in the rolling-batch format: one line per token."""

    call: LmiCall
    answer: Answer
    state: ServerState
    formatters: Formatters = NO_FORMATTERS

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """One line per token, even if its text is empty; the last one ends the answer."""
        lines: list[dict[str, Any]] = [{"token": self._token(piece)} for piece in pieces]
        if self.answer.finish_reason is not None:
            if not lines:  # stopped before its first token
                lines = [{"token": {"id": -1, "text": "", "log_prob": None}}]
            lines[-1] |= {"generated_text": self._generated_text()}
            if self.call.parameters.details:
                lines[-1] |= {"details": self._details()}
        return b"".join([self._line(line) for line in lines])

    def end(self) -> bytes:
        """Bytes after the last line."""
        return b""

    def failure(self, exc: EngineError) -> bytes:
        """The line that ends a stream (status 200 already sent) when the engine fails."""
        _, body = failure("lmi", exc, self.state.model_name)
        return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)

    def whole(self) -> dict[str, Any]:
        """The body of an unstreamed reply."""
        body: dict[str, Any] = {"generated_text": self._generated_text()}
        if self.call.parameters.details:
            body["details"] = self._unstreamed_details()
        return self.formatters.reply(body)

    def _unstreamed_details(self) -> dict[str, Any]:
        pieces = self.answer.pieces
        details = self._details() | {"tokens": [self._token(piece) for piece in pieces]}
        if self.answer.prompt.sampling.top_logprobs:
            text = self.state.codec.token_text
            details["top_tokens"] = [
                [{"id": i, "text": text(i), "log_prob": logprob} for i, logprob in piece.ranked] for piece in pieces
            ]
        return details

    def _line(self, line: dict[str, Any]) -> bytes:
        return orjson.dumps(self.formatters.reply(line), option=orjson.OPT_APPEND_NEWLINE)

    def _token(self, piece: Piece) -> dict[str, Any]:
        token = {"id": piece.token_id, "text": piece.text, "log_prob": piece.logprob}
        if piece.token_id in self.state.codec.eos_token_ids:
            token["special_token"] = True
        return token

    def _generated_text(self) -> str:
        text = self.answer.text
        return self.call.inputs + text if self.call.parameters.return_full_text else text

    def _details(self) -> dict[str, Any]:
        """The details that streamed and whole answers share; `engine` is this engine's addition."""
        reason, generation = self.answer.finish_reason or "error", self.answer.generation
        engine: dict[str, Any] = {}
        for phase in ("queue", "prefill", "decode"):
            seconds: float | None = getattr(generation, f"{phase}_s")
            engine[f"{phase}_ms"] = None if seconds is None else s_to_ms(seconds)
        if generation.drafted_tokens:
            engine["drafted_tokens"] = generation.drafted_tokens
            engine["accepted_tokens"] = generation.accepted_tokens
        return {
            "finish_reason": _FINISH_REASONS.get(reason, reason),
            "generated_tokens": len(self.answer.pieces),
            "inputs": self.call.inputs,
            "engine": engine,
        }


class AsyncReply(RollingBatchReply):
    """One answer in the async-mode format: one line per engine event.

    As in LMI, only an event's first token has its id, a stream counts one token too many and ends
    with two blank lines, and an unstreamed `finish_reason` is null except for a stop string.
    """

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """One line with the text of all its tokens."""
        first, answer = pieces[0] if pieces else Piece(-1, "", None), self.answer
        text, details = "".join([piece.text for piece in pieces]), None
        ended = answer.finish_reason is not None
        if ended and self.call.parameters.details:
            details = {
                "finish_reason": openai_finish_reason(answer.finish_reason),
                "seed": answer.prompt.sampling.seed,
                "generated_tokens": len(answer.pieces) + 1,
                "input_length": len(answer.prompt.token_ids),
            }
        line = {
            "index": 0,
            "token": _token(first, text),
            "generated_text": self._generated_text() if ended else None,
            "details": details,
        }
        return self._line(line)

    def end(self) -> bytes:
        """Blank lines, in place of vLLM's usage chunk and end marker."""
        return b"\n\n"

    def _unstreamed_details(self) -> dict[str, Any]:
        return {
            "finish_reason": self.answer.stop_string,
            "generated_tokens": len(self.answer.pieces),
            "seed": self.answer.prompt.sampling.seed,
            "prefill": [],
            "tokens": [_token(piece, piece.text) for piece in self.answer.pieces],
        }


class BatchedReply(RollingBatchReply):
    """One of the answers to a request of dynamic batching: its text, without details."""

    def whole(self) -> dict[str, Any]:
        return self.formatters.reply({"generated_text": self._generated_text()})


def _token(piece: Piece, text: str) -> dict[str, Any]:
    return {"id": piece.token_id, "text": text, "logprob": piece.logprob}


LMI_REPLIES: Mapping[str, type[RollingBatchReply]] = {
    "rolling": RollingBatchReply,
    "async": AsyncReply,
    "batched": BatchedReply,
}
AS_TGI = "tgi"


@dataclass(frozen=True, slots=True)
class Replies:
    """A container's answers.

    kind        one of `LMI_REPLIES`; `AS_TGI`: SageMaker's paths answer as a TGI container's
    streams     True: in lines, False: whole, whatever a body's `stream` says; None: as it says
    formatters  functions that change the bodies
    """

    kind: str = "rolling"
    streams: bool | None = None
    formatters: Formatters = NO_FORMATTERS


USUAL_REPLIES = Replies()


@dataclass(frozen=True, slots=True)
class LmiRoutes:
    """Handlers over one served model."""

    state: ServerState
    replies: Replies = USUAL_REPLIES

    async def ping(self, request: web.Request) -> web.Response:
        """200 while the engine works, else 500."""
        if self.state.engine.error is not None:
            return json_response({"status": "Unhealthy"}, status=500)
        return json_response({"status": "Healthy"})

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """Generate text, at once or as a stream of JSON lines."""
        state, formatters, streams = self.state, self.replies.formatters, self.replies.streams
        reply_type = LMI_REPLIES.get(self.replies.kind, RollingBatchReply)
        body = formatters.request(fields.load_json_object(await request.read()), state.codec)
        batched = reply_type is BatchedReply and not body.get("stream")
        sent = body.get("parameters", {}) if reply_type is AsyncReply else None
        if isinstance(sent, dict) and sent.get("do_sample") is not False:  # as vLLM would draw
            stated = {name: value for name, value in sent.items() if value is not None}
            body = body | {"parameters": {"do_sample": True, **state.codec.sampling, **stated}}
        sent = body.get("inputs")
        texts = sent if batched and isinstance(sent, list) and sent else [sent]
        fixed = {} if streams is None else {"stream": streams}
        calls = [LmiCall.read(body | fixed | {"inputs": text}) for text in texts]
        streaming.check_count(state, len(calls))
        answers: list[Answer] = []
        try:
            for call in calls:
                asked = call.parameters
                token_ids = await state.encode(call.inputs, asked.truncate)
                sampling = call.sampling(state.codec.eos_token_ids)
                keeps, stops = asked.include_stop_str_in_output, asked.stop_sequences + asked.stop
                answers.append(state.submit(Prompt(token_ids, sampling, stops, keeps)))
            headers = state.ignored_header(calls[0].ignored)
            replies = [reply_type(call, answer, state, formatters) for call, answer in zip(calls, answers, strict=True)]
            if calls[0].stream:
                return await streaming.send_stream(
                    state, request, answers, replies[0], headers={"Content-Type": "application/jsonlines", **headers}
                )
            await streaming.complete_all(answers)
            whole = [reply.whole() for reply in replies]
            return json_response(whole if batched else whole[0], headers=headers)
        finally:
            streaming.end_all(state, answers)
