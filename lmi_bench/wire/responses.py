"""OpenAI's Responses API (`/v1/responses`), also of vLLM.

A stream consists of named events: the text comes as deltas, the counts with the event that ends the
response. Reasoning comes as its text or as a summary, or is counted and not shown. OpenAI accepts no
`max_output_tokens` below 16, and its reasoning models no `temperature`, so that none is sent; vLLM
takes `ignore_eos`. Sources: the API's reference; vllm/entrypoints/openai/responses, 2026.
"""

from collections.abc import Iterator
from typing import Any, Final

import orjson

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.json_format import SseFormat, error_event
from lmi_bench.wire.openai import counts_of

LEAST_TOKENS: Final = 16
_LAST: Final = ("response.completed", "response.incomplete")


class ResponsesFormat(SseFormat):
    """`/v1/responses`: the conversation as `input`; OpenAI is asked to store nothing."""

    name = "openai-responses"
    path = "/v1/responses"
    payload_name = "an event of the Responses API"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        said = self.turns(request) if request.messages else self.prompt_text(request)
        fields = {"model": model, "input": said, "max_output_tokens": request.output_tokens}
        fields |= {"stream": stream, "store": False}
        return orjson.dumps(fields | ({"ignore_eos": True} if request.ignore_eos else {}))

    def event(self, reply: dict[str, Any]) -> WireEvent:
        kind = reply.get("type")
        if kind in _LAST:
            return _last(reply["response"])
        if kind == "response.failed":
            return error_event({"error": reply["response"].get("error") or "the response failed"})
        if reply.get("object") == "response":
            if reply.get("error"):
                return error_event(reply)
            parts = list(_parts(reply["output"]))
            thought, text = ("".join(of[shown] for of in parts) for shown in (0, 1))
            return _last(reply, text=thought + text, reasoning=bool(thought) and not text)
        if kind == "error" or reply.get("error"):
            return error_event(reply)
        if not isinstance(kind, str):
            raise TypeError("its type is no word")
        if kind.endswith(".delta") and "audio" not in kind:
            return WireEvent(text="" + reply["delta"], reasoning="reasoning" in kind)
        return WireEvent()  # created, in progress, the beginning or the end of an item


def _last(response: dict[str, Any], **more: Any) -> WireEvent:
    """The end of a response, with its counts and why it ended."""
    incomplete = response.get("incomplete_details") or {}
    reason = incomplete.get("reason") or response.get("status")
    return WireEvent(finish_reason=reason, end=True, **counts_of(response, "input_tokens", "output_tokens"), **more)


def _parts(items: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(reasoning, text) of each part of a response's items."""
    for item in items:
        for part in (*(item.get("summary") or ()), *(item.get("content") or ())):
            text = part.get("text") or part.get("refusal") or ""
            yield (text, "") if item.get("type") == "reasoning" else ("", text)
        yield "", item.get("arguments") or ""
