"""The OpenAI routes, compatible with vLLM: completions, chat, models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from lmi_bench.engine.server.answer import Answer, Prompt
from lmi_bench.engine.server.choices import (
    choice_writes,
    complete_all,
    end_all,
    submit_choices,
)
from lmi_bench.engine.server.failures import UnknownModelError, json_response
from lmi_bench.engine.server.openai_reply import (
    ChatReply,
    CompletionReply,
    EchoedCompletionReply,
    OpenAiReply,
)
from lmi_bench.engine.server.openai_request import (
    Message,
    OpenAiCall,
    read_chat_call,
    read_completion_call,
)
from lmi_bench.engine.server.state import ServerState
from lmi_bench.engine.server.streaming import PLAIN, Envelope, send_stream, stream_writes

ChatEncoder = Callable[[Sequence[Message], Mapping[str, Any]], list[int]]
"""Encodes a chat as token ids, given template variables; raises InputError if the template
rejects the messages."""


def plain_chat(messages: Sequence[Message]) -> str:
    """The prompt for a model without a template: one line per message, with nothing added."""
    return "\n".join(message.content for message in messages)


class OpenAiRoutes:
    """Handlers over one served model."""

    def __init__(self, state: ServerState, encode_chat: ChatEncoder | None = None) -> None:
        """encode_chat  None: use `plain_chat`"""
        self._state = state
        self._encode_chat = encode_chat

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)

    async def models(self, request: web.Request) -> web.Response:
        """The served model."""
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

    async def completions(
        self, request: web.Request, envelope: Envelope = PLAIN
    ) -> web.StreamResponse:
        """Continue a prompt, at once or as server-sent events."""
        call = read_completion_call(await request.read(), self._state.codec.eos_token_ids)
        reply_type = EchoedCompletionReply if call.echo else CompletionReply
        return await self._generate(request, call, reply_type, envelope)

    async def chat(self, request: web.Request, envelope: Envelope = PLAIN) -> web.StreamResponse:
        """Answer a chat, at once or as server-sent events."""
        call = read_chat_call(await request.read(), self._state.codec.eos_token_ids)
        return await self._generate(request, call, ChatReply, envelope)

    async def _generate(
        self,
        request: web.Request,
        call: OpenAiCall,
        reply_type: type[OpenAiReply],
        envelope: Envelope,
    ) -> web.StreamResponse:
        state = self._state
        if call.model is not None and call.model != state.model_name:
            raise UnknownModelError(
                f"The model `{call.model}` does not exist: this server serves `{state.model_name}`"
            )
        prompt = await self._prompt(call)
        if call.num_choices == 1:
            answers = [state.submit(prompt)]
        else:
            answers = await submit_choices(state, prompt, call.num_choices)
        try:
            headers = state.ignored_header(call.ignored)
            reply = reply_type(call, answers, state)
            if call.stream:
                return await self._stream(request, answers, reply, headers, envelope)
            await complete_all(answers)
            return json_response(reply.whole(), headers=headers)
        finally:
            end_all(state, answers)

    async def _stream(
        self,
        request: web.Request,
        answers: Sequence[Answer],
        reply: OpenAiReply,
        headers: dict[str, str],
        envelope: Envelope,
    ) -> web.StreamResponse:
        headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            **headers,
        }
        if len(answers) == 1:
            (answer,) = answers
            writes = stream_writes(answer, reply.event, reply.last_events, reply.failure_events)
        else:
            writes = choice_writes(answers, reply.event, reply.last_events, reply.failure_events)
        return await send_stream(request, writes, headers=headers, envelope=envelope)

    async def _prompt(self, call: OpenAiCall) -> Prompt:
        token_ids = await self._token_ids(call)
        if call.truncate is not None:
            token_ids = token_ids[-call.truncate :]
        sampling = call.sampling
        if call.max_tokens is None:
            room = self._state.max_model_len - len(token_ids)
            sampling = replace(sampling, max_new_tokens=max(room, sampling.max_new_tokens))
        text = self._shown(call, token_ids) if call.echo else ""
        return Prompt(token_ids, sampling, call.stop_strings, call.keep_stop_string, text)

    def _shown(self, call: OpenAiCall, token_ids: list[int]) -> str:
        """The prompt's text for an echo: as sent, or what truncation left."""
        if isinstance(call.prompt, str) and call.truncate is None:
            return call.prompt
        return self._state.codec.decode(token_ids)

    async def _token_ids(self, call: OpenAiCall) -> list[int]:
        if call.messages and self._encode_chat is not None:
            return await asyncio.to_thread(self._encode_chat, call.messages, call.chat_options)
        if call.messages:
            return await self._state.encode(plain_chat(call.messages))
        if isinstance(call.prompt, str):
            return await self._state.encode(call.prompt)
        return call.prompt
