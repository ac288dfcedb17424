"""The OpenAI routes, compatible with vLLM: completions, chat, models, and their replies."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any, ClassVar

import orjson
from aiohttp import web

from lmi_bench import __version__
from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.grammar import read_grammar
from lmi_bench.engine.server import streaming
from lmi_bench.engine.server.answer import Answer, Piece, Prompt, openai_finish_reason
from lmi_bench.engine.server.failures import UnknownModelError, failure, json_response
from lmi_bench.engine.server.fields import load_json_object
from lmi_bench.engine.server.openai_request import ChatCall, CompletionCall, DetokenizeCall, OpenAiCall
from lmi_bench.engine.server.state import METRICS_TYPE, ServerState, render_metrics
from lmi_bench.engine.server.tool_calls import CallFinder

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class OpenAiReply(ABC):
    """The parts that completions and chats share: chunk frame, usage, end marker, failures. A reply
    has one or more answers, its choices."""

    id_prefix: ClassVar[str]
    stream_object: ClassVar[str]
    whole_object: ClassVar[str]
    plain_choice: ClassVar[bytes]  # of most chunks: %d its number, %b its text

    def __init__(self, call: OpenAiCall, answers: Sequence[Answer], state: ServerState) -> None:
        self._call = call
        self._answers = answers
        self._begun: set[int] = set()  # choices with an event
        self._text_offsets = [0] * len(answers)  # of each choice's next token
        self._codec = state.codec
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.stream_object,
            "created": int(time.time()),
            "model": state.model_name,
        }
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":'
        in_channels = isinstance(call, ChatCall) and state.codec.has_channels
        self._is_plain = not (
            call.num_logprobs is not None
            or call.return_token_ids
            or call.stream_options.continuous_usage_stats
            or call.most_tool_calls != 0
            or in_channels
        )
        tools = call.tools if isinstance(call, ChatCall) else ()
        self._finders = [CallFinder(call.most_tool_calls, tools, in_channels=in_channels) for _ in answers]

    @abstractmethod
    def _stream_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        """The protocol's own fields of a chunk's choice."""

    def _whole_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        """The protocol's own fields of an unstreamed choice."""
        return self._stream_choice(text, pieces, number)

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """One chunk for one engine event of a choice, even if it adds no text."""
        text = "".join([piece.text for piece in pieces])
        answer = self._answers[number]
        if self._is_plain and answer.finish_reason is None and number in self._begun:
            return self._prefix + self.plain_choice % (number, orjson.dumps(text))
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
        _, body = failure("openai", exc)
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
        stopped: str | int | None = answer.stop_string
        if reason == "stop_sequence" and stopped is None and answer.pieces:
            stopped = answer.pieces[-1].token_id
        choice = {"index": number, **own, "finish_reason": shown, "stop_reason": stopped}
        if self._call.return_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
        return choice

    def _prompt_ids(self, number: int) -> dict[str, list[int]]:
        """vLLM's field of a completion's choice, and of a chat."""
        ids = self._answers[number].prompt.token_ids
        return {"prompt_token_ids": list(ids)} if self._call.return_token_ids else {}

    def _usage(self) -> dict[str, int]:
        """Token counts: each prompt once, and the output of all choices so far."""
        firsts = self._answers[:: self._call.n]
        num_prompt = sum([len(answer.prompt.token_ids) for answer in firsts])
        num_output = sum([len(answer.pieces) for answer in self._answers])
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


class CompletionReply(OpenAiReply):
    """`/v1/completions`, with an echoed prompt before each choice."""

    id_prefix = "cmpl"
    stream_object = "text_completion"
    whole_object = "text_completion"
    plain_choice = b'[{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'

    def _stream_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if number not in self._begun:
            self._begun.add(number)
            answer = self._answers[number]
            own = self._prompt_ids(number)
            text = answer.prompt.text + text
            pieces = answer.prompt_pieces(self._codec) + pieces
        logprobs = self._logprobs(pieces, number) if self._call.num_logprobs is not None else None
        return {"text": text, "logprobs": logprobs, **own}

    def _logprobs(self, pieces: list[Piece], number: int) -> dict[str, Any]:
        tokens = [self._name(piece.token_id) for piece in pieces]
        offsets = []
        for piece in pieces:
            offsets.append(self._text_offsets[number])
            self._text_offsets[number] += piece.num_chars
        return {
            "text_offset": offsets,
            "token_logprobs": [piece.logprob for piece in pieces],
            "tokens": tokens,
            "top_logprobs": [
                None if piece.logprob is None else self._by_text(piece, token)
                for token, piece in zip(tokens, pieces, strict=True)
            ],
        }

    def _by_text(self, piece: Piece, token: str) -> dict[str, float | None]:
        """Log-probabilities of the chosen and most likely tokens by text; the first of equals."""
        found: dict[str, float | None] = {token: piece.logprob}
        for token_id, logprob in piece.ranked:
            found.setdefault(self._name(token_id), logprob)
        return found

    def _name(self, token_id: int) -> str:
        """A token's text or, as in OpenAI, the bytes of a part of a character: all of them have one
        text, by which the likeliest would be taken for the chosen one."""
        text = self._codec.token_text(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in self._codec.token_bytes(token_id)])


class ChatReply(OpenAiReply):
    """`/v1/chat/completions`. As in vLLM, a role-only chunk precedes the first token."""

    id_prefix = "chatcmpl"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    plain_choice = b'[{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'

    def event(self, pieces: list[Piece], number: int = 0) -> bytes:
        """One chunk for one engine event, after the role chunk if it is the choice's first."""
        events = super().event(pieces, number)
        if number in self._begun:
            return events
        self._begun.add(number)
        delta = {"role": "assistant", "content": ""}
        role = {"index": number, "delta": delta, "finish_reason": None, "logprobs": None}
        found = self._head | {"choices": [role], **self._prompt_ids(number)}
        return b"data: " + orjson.dumps(found) + b"\n\n" + events

    def whole(self) -> dict[str, Any]:
        """The body of an unstreamed reply."""
        return super().whole() | self._prompt_ids(0)

    def _stream_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        return {"delta": self._message(text, number), "logprobs": self._logprobs(pieces)}

    def _whole_choice(self, text: str, pieces: list[Piece], number: int) -> dict[str, Any]:
        message = {"role": "assistant", **self._message(text, number)}
        for call in message.get("tool_calls", ()):
            del call["index"]
            message["content"] = message["content"] or None
        return {"message": message, "logprobs": self._logprobs(pieces)}

    def _message(self, text: str, number: int) -> dict[str, Any]:
        """What a text adds to the content, the reasoning and the tool calls."""
        ended = self._answers[number].finish_reason is not None
        content, thought, calls = self._finders[number].push(text, ended=ended)
        message: dict[str, Any] = {"content": content}
        if thought:
            message["reasoning"] = thought  # vLLM's name
        return message | {"tool_calls": calls} if calls else message

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._call.num_logprobs is None:
            return None
        content = []
        for piece in pieces:
            ranked = [self._entry(*each) for each in piece.ranked]
            content.append(self._entry(piece.token_id, piece.logprob) | {"top_logprobs": ranked})
        return {"content": content}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        in_bytes = list(self._codec.token_bytes(token_id))
        return {"token": self._codec.token_text(token_id), "logprob": logprob, "bytes": in_bytes}


@dataclass(frozen=True, slots=True)
class OpenAiRoutes:
    """Handlers over one served model.

    template  None: the model has none, and a prompt is one line per message
    """

    state: ServerState
    template: ChatTemplate | None = None

    async def models(self, request: web.Request) -> web.Response:
        """The one model: alone if the path names it, else in a list."""
        state, name = self.state, request.match_info.get("model")
        self._check_model(name)
        model = {"id": state.model_name, "object": "model", "created": state.created, "owned_by": "lmi-bench"}
        model |= {"root": state.model_name, "parent": None, "max_model_len": state.max_model_len}
        return json_response(model if name else {"object": "list", "data": [model]})

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus, under vLLM's names."""
        body = render_metrics(self.state).encode()
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def tokenize(self, request: web.Request) -> web.Response:
        """The tokens of a prompt or a chat, as they would be computed."""
        body = load_json_object(await request.read())
        call = (ChatCall if "messages" in body else CompletionCall).read(body)
        self._check_model(call.model)
        (_, tokens), *more = await self._tokens(call, limited=False)
        if more:
            raise InputError("prompt must be one text")
        found = {"count": len(tokens), "max_model_len": self.state.max_model_len, "tokens": tokens}
        return json_response(found | {"token_strs": None})

    async def detokenize(self, request: web.Request) -> web.Response:
        call, size = DetokenizeCall.read(await request.read()), self.state.vocab_size
        self._check_model(call.model)
        if max(call.tokens, default=0) >= size:
            raise InputError(f"tokens must be ids below {size}, got {max(call.tokens)}")
        prompt = self.state.codec.decode(call.tokens, skip_special_tokens=False)
        return json_response({"prompt": prompt})

    def _check_model(self, name: str | None) -> None:
        served = self.state.model_name
        if name not in (None, served):
            raise UnknownModelError(f"The model `{name}` does not exist: this server serves `{served}`")

    async def _generate(
        self, kind: type[OpenAiCall], reply_type: type[OpenAiReply], request: web.Request
    ) -> web.StreamResponse:
        """Continue a prompt or answer a chat, at once or as server-sent events."""
        state, sent = self.state, load_json_object(await request.read())
        stated = {name: value for name, value in sent.items() if value is not None}
        call = kind.read({**state.codec.sampling, **stated})
        self._check_model(call.model)
        answers: list[Answer] = []
        try:
            prompts = await self._prompts(call)
            streaming.check_count(state, len(prompts) * call.n)
            for prompt in prompts:
                answers += await streaming.submit_choices(state, prompt, call.n)
            headers = state.ignored_header(call.ignored)
            reply = reply_type(call, answers, state)
            if not call.stream:
                await streaming.complete_all(answers)
                return json_response(reply.whole(), headers=headers)
            return await streaming.send_stream(state, request, answers, reply, headers=_STREAM_HEADERS | headers)
        finally:
            streaming.end_all(state, answers)

    completions = partialmethod(_generate, CompletionCall, CompletionReply)
    chat = partialmethod(_generate, ChatCall, ChatReply)

    async def _prompts(self, call: OpenAiCall) -> list[Prompt]:
        state, cut = self.state, call.truncate_prompt_tokens
        grammar = None
        if constraint := call.constraint():
            folder = getattr(state.codec, "folder", None)
            grammar = await asyncio.to_thread(read_grammar, *constraint, folder, state.vocab_size)
        prompts, keeps, alone = [], call.include_stop_str_in_output, call.max_tokens == 0
        special = isinstance(call, ChatCall) and (call.most_tool_calls != 0 or state.codec.has_channels)
        for sent, tokens in await self._tokens(call):
            token_ids = tokens if cut is None else tokens[-cut:]
            rest = state.max_model_len - len(token_ids)
            rest = max(min(rest, state.codec.max_new_tokens or rest), call.min_tokens, 1)
            sampling = call.sampling_with(
                call.num_logprobs,
                max_new_tokens=rest if call.max_tokens is None else max(call.max_tokens, 1),
                prompt_logprobs=call.echo and call.num_logprobs is not None,
                eos_token_ids=state.codec.eos_token_ids,
                grammar=grammar,
            )
            text = ""
            if call.echo:
                text = sent if isinstance(sent, str) and not cut else state.codec.decode(token_ids)
            prompts.append(Prompt(token_ids, sampling, call.stop, keeps, text, alone=alone, shows_special=special))
        return prompts

    async def _tokens(self, call: OpenAiCall, *, limited: bool = True) -> list[tuple[str | list[int], list[int]]]:
        """Each prompt, as text or tokens, and its tokens."""
        prompts: list[str | list[int]]
        if isinstance(call, CompletionCall):
            prompts, special = call.prompts, call.add_special_tokens
        elif call.tools and not (self.template and self.template.takes_tools):
            raise InputError("tools need a model whose chat template knows them: omit tools")
        elif self.template is None:
            prompts, special = ["\n".join([message.content for message in call.messages])], True
        else:
            messages = [message.for_template() for message in call.messages]
            render, variables = self.template.render, call.template_variables()
            prompts = [await asyncio.to_thread(render, messages, variables)]
            special = False  # the template has them
        encode = partial(
            self.state.encode, truncate=call.truncate_prompt_tokens, add_special_tokens=special, limited=limited
        )
        return [(each, await encode(each) if isinstance(each, str) else each) for each in prompts]
