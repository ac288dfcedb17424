"""The OpenAI routes, compatible with vLLM: completions, chat, models, and their replies."""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, ClassVar

import orjson
from aiohttp import web

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.grammar import read_grammar
from lmi_bench.engine.server import streaming
from lmi_bench.engine.server.answer import Answer, Piece, Prompt, openai_finish_reason
from lmi_bench.engine.server.failures import UnknownModelError, json_response, openai_failure
from lmi_bench.engine.server.openai_request import ChatCall, CompletionCall, OpenAiCall
from lmi_bench.engine.server.state import ServerState
from lmi_bench.engine.server.tool_calls import CallFinder

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class OpenAiReply(ABC):
    """The parts that completions and chats share: chunk frame, usage, end marker, failures. A reply
    has one or more answers, its choices."""

    id_prefix: ClassVar[str]
    stream_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(self, call: OpenAiCall, answers: Sequence[Answer], state: ServerState) -> None:
        self._call = call
        self._answers = answers
        self._begun: set[int] = set()  # choices with an event
        self._codec = state.codec
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.stream_object,
            "created": state.created,
            "model": state.model_name,
        }
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":'
        self._finders = [CallFinder(call.most_tool_calls) for _ in answers]

    @abstractmethod
    def _stream_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        """The protocol's own fields of a chunk's choice."""

    def _whole_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        """The protocol's own fields of an unstreamed choice."""
        return self._stream_choice(text, pieces, number)

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """One chunk for one engine event of a choice, even if it adds no text."""
        text = "".join([piece.text for piece in pieces])
        own = self._stream_choice(text, pieces, number)
        tail = b"}\n\n"
        if self._call.stream_options.continuous_usage_stats:
            tail = b',"usage":' + orjson.dumps(self._usage()) + tail
        return self._prefix + orjson.dumps([self._choice(own, pieces, number)]) + tail

    def end(self) -> bytes:
        """The usage chunk, if requested, and the end marker."""
        if not self._call.stream_options.include_usage:
            return _DONE
        usage = orjson.dumps(self._usage())
        return self._prefix + b'[],"usage":' + usage + b"}\n\n" + _DONE

    def failure(self, exc: EngineError) -> bytes:
        """The event that ends a stream (status 200 already sent) when the engine fails."""
        _, body = openai_failure(exc)
        return b"data: " + orjson.dumps(body) + b"\n\n" + _DONE

    def whole(self) -> dict[str, Any]:
        """The body of an unstreamed reply."""
        choices = []
        for number, answer in enumerate(self._answers):
            own = self._whole_choice(answer.text, answer.pieces, number)
            choices.append(self._choice(own, answer.pieces, number))
        head = self._head | {"object": self.whole_object}
        return head | {"choices": choices, "usage": self._usage()}

    def _choice(self, own: dict[str, Any], pieces: list[Piece], number: int) -> dict[str, Any]:
        answer = self._answers[number]
        reason = answer.finish_reason
        shown = None if reason is None else openai_finish_reason(reason)
        called = self._finders[number].num_found and not isinstance(self._call.tool_choice, dict)
        if shown == "stop" and called:  # a named tool's call ends like a text, as in vLLM
            shown = "tool_calls"
        choice = {
            "index": number,
            **own,
            "finish_reason": shown,
            "stop_reason": None if reason != "stop_sequence" else _stop_reason(answer),
        }
        if self._call.return_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
        return choice

    def _usage(self) -> dict[str, int]:
        """Token counts: the prompt once, and the output of all choices so far."""
        num_prompt = len(self._answers[0].prompt.token_ids)
        num_output = sum([len(answer.pieces) for answer in self._answers])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }


class CompletionReply(OpenAiReply):
    """`/v1/completions`, with an echoed prompt before each choice."""

    id_prefix = "cmpl"
    stream_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, call: OpenAiCall, answers: Sequence[Answer], state: ServerState) -> None:
        super().__init__(call, answers, state)
        self._text_offsets = [0] * len(answers)

    def _stream_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        if number not in self._begun:
            self._begun.add(number)
            text = self._answers[number].prompt.text + text
        logprobs = self._logprobs(pieces, number) if self._call.num_logprobs is not None else None
        return {"text": text, "logprobs": logprobs}

    def _logprobs(self, pieces: list[Piece], number: int) -> dict[str, Any]:
        tokens = [self._codec.decode([piece.token_id]) for piece in pieces]
        offsets = []
        for piece in pieces:
            offsets.append(self._text_offsets[number])
            self._text_offsets[number] += len(piece.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [piece.logprob for piece in pieces],
            "tokens": tokens,
            "top_logprobs": [
                self._by_text(piece, token) for token, piece in zip(tokens, pieces, strict=True)
            ],
        }

    def _by_text(self, piece: Piece, token: str) -> dict[str, float | None]:
        """Log-probabilities of the chosen and most likely tokens by text; the first of equals."""
        found: dict[str, float | None] = {token: piece.logprob}
        for token_id, logprob in piece.ranked:
            found.setdefault(self._codec.decode([token_id]), logprob)
        return found


class ChatReply(OpenAiReply):
    """`/v1/chat/completions`. As in vLLM, a role-only chunk precedes the first token."""

    id_prefix = "chatcmpl"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """One chunk for one engine event, after the role chunk if it is the choice's first."""
        events = super().event(pieces, number)
        if number in self._begun:
            return events
        self._begun.add(number)
        delta = {"role": "assistant", "content": ""}
        role = {"index": number, "delta": delta, "finish_reason": None, "logprobs": None}
        return self._prefix + orjson.dumps([role]) + b"}\n\n" + events

    def _stream_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        return {"delta": self._message(text, number), "logprobs": self._logprobs(pieces)}

    def _whole_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        message = {"role": "assistant", **self._message(text, number)}
        for call in message.get("tool_calls", ()):
            del call["index"]
            message["content"] = message["content"] or None
        return {"message": message, "logprobs": self._logprobs(pieces)}

    def _message(self, text: str, number: int) -> dict[str, Any]:
        """What a text adds to the content and the tool calls."""
        ended = self._answers[number].finish_reason is not None
        content, calls = self._finders[number].push(text, ended=ended)
        return {"content": content, "tool_calls": calls} if calls else {"content": content}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._call.num_logprobs is None:
            return None
        return {"content": [self._logprob(piece) for piece in pieces]}

    def _logprob(self, piece: Piece) -> dict[str, Any]:
        ranked = [self._entry(token_id, logprob) for token_id, logprob in piece.ranked]
        return self._entry(piece.token_id, piece.logprob) | {"top_logprobs": ranked}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        token = self._codec.decode([token_id])
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _stop_reason(answer: Answer) -> str | int | None:
    if answer.stop_string is not None or not answer.pieces:
        return answer.stop_string
    return answer.pieces[-1].token_id


@dataclass(frozen=True, slots=True)
class OpenAiRoutes:
    """Handlers over one served model.

    template  None: the model has none, and a prompt is one line per message
    """

    state: ServerState
    template: ChatTemplate | None = None

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)

    async def models(self, request: web.Request) -> web.Response:
        state = self.state
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

    async def _generate(
        self,
        kind: type[OpenAiCall],
        reply_type: type[OpenAiReply],
        request: web.Request,
        envelope: streaming.Envelope = streaming.PLAIN,
    ) -> web.StreamResponse:
        """Continue a prompt or answer a chat, at once or as server-sent events."""
        call = kind.read(await request.read())
        state = self.state
        if call.model is not None and call.model != state.model_name:
            raise UnknownModelError(
                f"The model `{call.model}` does not exist: this server serves `{state.model_name}`"
            )
        prompt = await self._prompt(call)
        answers = await streaming.submit_choices(state, prompt, call.n)
        try:
            headers = state.ignored_header(call.ignored)
            reply = reply_type(call, answers, state)
            if not call.stream:
                await streaming.complete_all(answers)
                return json_response(reply.whole(), headers=headers)
            return await streaming.send_stream(
                request,
                streaming.writes(answers, reply),
                headers=_STREAM_HEADERS | headers,
                envelope=envelope,
            )
        finally:
            streaming.end_all(state, answers)

    completions = partialmethod(_generate, CompletionCall, CompletionReply)
    chat = partialmethod(_generate, ChatCall, ChatReply)

    async def _prompt(self, call: OpenAiCall) -> Prompt:
        state, cut = self.state, call.truncate_prompt_tokens
        token_ids = await self._token_ids(call)
        token_ids = token_ids if cut is None else token_ids[-cut:]
        grammar = None
        if constraint := call.constraint():
            folder = getattr(state.codec, "folder", None)
            grammar = await asyncio.to_thread(read_grammar, *constraint, folder, state.vocab_size)
        rest = max(state.max_model_len - len(token_ids), call.min_tokens, 1)
        sampling = call.sampling_with(
            call.num_logprobs,
            max_new_tokens=call.max_tokens or rest,
            eos_token_ids=state.codec.eos_token_ids,
            grammar=grammar,
        )
        text = ""
        if isinstance(call, CompletionCall) and call.echo:
            text = state.codec.decode(token_ids)
            if isinstance(call.prompt, str) and cut is None:  # as sent
                text = call.prompt
        return Prompt(token_ids, sampling, call.stop, call.include_stop_str_in_output, text)

    async def _token_ids(self, call: OpenAiCall) -> list[int]:
        if isinstance(call, CompletionCall):
            prompt = call.prompt
            return await self.state.encode(prompt) if isinstance(prompt, str) else prompt
        template = self.template
        if call.tools and (template is None or not template.takes_tools):
            raise InputError("tools need a model whose chat template knows them: omit tools")
        if template is None:
            return await self.state.encode("\n".join(message.content for message in call.messages))
        messages = [message.for_template() for message in call.messages]
        text = await asyncio.to_thread(template.render, messages, call.template_variables())
        return await self.state.encode(text, add_special_tokens=False)  # the template has them
