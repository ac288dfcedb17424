"""Anthropic's Messages API, `/v1/messages`, which vLLM, SGLang and LiteLLM serve, too.

An answer is a list of blocks (text, thinking, a tool's input). `input_tokens` leaves out the part
of the prompt that a cache knew or took; a server that has no counts yet when the stream begins says
0, and states them at its end. No field forces a length, and newer models refuse `temperature`, so
that neither is sent. vLLM ends a broken stream with `[DONE]`. Sources: the API's reference
(version 2023-06-01); vllm/entrypoints/anthropic and sglang/srt/entrypoints/anthropic, 2026.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.json_format import SseFormat, error_event

VERSION: Final = "2023-06-01"
_TEXT: Final[Mapping[str, str]] = {
    "text": "text",
    "text_delta": "text",
    "thinking": "thinking",
    "thinking_delta": "thinking",
    "tool_use": "name",
    "input_json_delta": "partial_json",
}
"""The field that holds the generated text of each kind of delta and block."""


class AnthropicFormat(SseFormat):
    """`/v1/messages`; the key is sent as `x-api-key`, beside the API's version."""

    name = "anthropic"
    path = "/v1/messages"
    payload_name = "an event of the Messages API"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        turns = self.turns(request)
        system = "\n".join(each["content"] for each in turns if each["role"] == "system")
        messages = [each for each in turns if each["role"] != "system"]
        asked = {"model": model, "max_tokens": request.output_tokens, "messages": messages}
        more = {"system": system} if system else {}
        return orjson.dumps({**asked, "stream": stream, **more})

    def event(self, reply: dict[str, Any]) -> WireEvent:
        """Read an event or a whole message. A ping, the end of a block, and an event that the API
        has gained since hold nothing."""
        kind = reply.get("type")
        if kind == "error" or (kind is None and reply.get("error")):
            return error_event(reply)
        if kind in ("content_block_start", "content_block_delta"):
            return _generated([reply.get("content_block") or reply["delta"]])
        if kind is None:
            raise KeyError("type")
        message = reply["message"] if kind == "message_start" else reply
        usage = message.get("usage") or {}
        return _generated(
            reply["content"] if kind == "message" else (),
            model=message.get("model"),
            finish_reason=(reply.get("delta") or message).get("stop_reason"),
            output_tokens=None if kind == "message_start" else usage.get("output_tokens"),
            **_prompt_counts(usage),
            end=kind in ("message", "message_stop"),
        )


def _generated(blocks: Sequence[dict[str, Any]], **more: Any) -> WireEvent:
    """What deltas or blocks add: thinking, then text. A signature has no tokens."""
    thought = text = ""
    for block in blocks:
        added = block.get(_TEXT.get(block["type"], "")) or ""
        if block["type"].startswith("thinking"):
            thought += added
        else:
            text += added
    return WireEvent(text=thought + text, reasoning=bool(thought) and not text, **more)


def _prompt_counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Prompt tokens, those of the cache included; None where nothing is counted yet."""
    cached = usage.get("cache_read_input_tokens")
    total = usage.get("input_tokens") or 0
    total += (cached or 0) + (usage.get("cache_creation_input_tokens") or 0)
    return {"input_tokens": total, "cached_tokens": cached} if total else {}
