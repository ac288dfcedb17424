"""Anthropic's Messages API, `/v1/messages`, which vLLM, SGLang and LiteLLM serve, too.

An answer is a list of blocks (text, thinking, a tool's input). `input_tokens` leaves out the part
of the prompt that a cache knew or took; a server that has no counts yet when the stream begins says
0, and states them at its end. No field forces a length, and newer models refuse `temperature`, so
that neither is sent. vLLM ends a broken stream with `[DONE]`. Sources: the API's reference
(version 2023-06-01); vllm/entrypoints/anthropic and sglang/srt/entrypoints/anthropic, 2026.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import orjson

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.json_format import SseFormat, error_event

VERSION: Final = "2023-06-01"
_TEXT: Final[Mapping[str, str]] = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
    "text": "text",
    "thinking": "thinking",
    "tool_use": "name",
}
"""The field that holds the generated text of each kind of delta and block."""


class AnthropicFormat(SseFormat):
    """`/v1/messages`; the key is sent as `x-api-key`, beside the API's version."""

    name = "anthropic"
    path: ClassVar[str] = "/v1/messages"
    payload_name = "an event of the Messages API"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        turns = self.turns(request)
        system = "\n".join(each["content"] for each in turns if each["role"] == "system")
        return orjson.dumps(
            {
                "model": model,
                "max_tokens": request.output_tokens,
                "messages": [each for each in turns if each["role"] != "system"],
                "stream": stream,
            }
            | ({"system": system} if system else {})
        )

    def event(self, reply: dict[str, Any]) -> WireEvent:
        match reply.get("type"):
            case "content_block_delta":
                return _generated([reply["delta"]])
            case "content_block_start":
                return _generated([reply["content_block"]])
            case "message_start":
                return WireEvent(**_prompt_counts(reply["message"].get("usage") or {}))
            case "message_delta":
                usage = reply.get("usage") or {}
                return WireEvent(
                    finish_reason=(reply.get("delta") or {}).get("stop_reason"),
                    output_tokens=usage.get("output_tokens"),
                    **_prompt_counts(usage),
                )
            case "message_stop":
                return WireEvent(end=True)
            case "message":
                usage = reply.get("usage") or {}
                return _generated(
                    reply["content"],
                    finish_reason=reply.get("stop_reason"),
                    output_tokens=usage.get("output_tokens"),
                    **_prompt_counts(usage),
                    end=True,
                )
            case "error":
                return error_event(reply)
            case None:
                if reply.get("error"):
                    return error_event(reply)
                raise KeyError("type")
        return WireEvent()  # a ping, the end of a block, or an event that the API has gained


def _generated(blocks: list[dict[str, Any]], **more: Any) -> WireEvent:
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
