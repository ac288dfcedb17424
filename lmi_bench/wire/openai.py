"""OpenAI's text protocols, as vLLM and similar servers serve them.

A chunk is not a token: speculative decoding and stream intervals put several tokens into one,
incomplete characters leave some chunks empty, and a chat's first chunk (`role` only) has none. So
events with text or ids are counted, and the total comes from the usage chunk without choices.
"""

import math
from typing import Any

import orjson

from lmi_bench.core.errors import InputError
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.framing import EitherSplitter
from lmi_bench.wire.json_format import SseFormat, error_event

_PLAIN_DELTA = {"content", "role"}


class _OpenAiFormat(SseFormat):
    """The response format that the completions and chat protocols share."""

    payload_name = "a completion chunk"
    new_splitter = EitherSplitter  # LMI's containers send JSON lines for OpenAI's bodies, too

    def event(self, reply: dict[str, Any]) -> WireEvent:
        if reply.get("error") or reply.get("object") == "error":
            return error_event(reply)
        counts = counts_of(reply, "prompt_tokens", "completion_tokens")
        choices = reply["choices"]
        if choices is None and reply.get("usage") is None:
            raise TypeError("neither choices nor usage")
        if not choices:
            return WireEvent(**counts)
        choice = choices[0]
        unstreamed = "message" in choice or (
            reply.get("object") == "text_completion" and choice.get("finish_reason") and reply.get("usage")
        )
        token_ids = choice.get("token_ids")
        thought, text = _choice_text(choice)
        return WireEvent(
            text=thought + text,
            token_ids=tuple(token_ids or ()),
            token_count=None if token_ids is None else len(token_ids),
            finish_reason=choice.get("finish_reason"),
            **counts,
            reasoning=bool(thought) and not text,
            end=bool(unstreamed),
        )

    def plain_text(self, payload: bytes) -> str | None:
        """Text of a chunk whose only choice adds text and nothing else."""
        try:
            chunk = orjson.loads(payload)
            (choice,) = chunk["choices"]
            if (
                choice["finish_reason"] is not None
                or "token_ids" in choice
                or chunk.get("usage") is not None
                or chunk.get("error") is not None
            ):
                return None
            if "text" in choice:
                text = choice["text"]
            else:
                delta = choice["delta"]
                if not delta.keys() <= _PLAIN_DELTA:
                    return None
                text = delta["content"]
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            return None
        return text if text and type(text) is str else None


class OpenAiCompletionsFormat(_OpenAiFormat):
    """`/v1/completions`: sends planned token ids as the prompt, so lengths are exact.

    token_ids  False: send text, for a server that accepts no ids (llama-cpp-python)
    """

    name = "openai"
    path = "/v1/completions"

    def __init__(self, *, token_ids: bool = True) -> None:
        self._token_ids = token_ids

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        ids = list(request.prompt_token_ids) if self._token_ids or not request.prompt_text else []
        prompt: list[int] | str = ids or request.prompt_text
        if not prompt:
            raise InputError(
                f"request {request.request_id} has neither prompt_token_ids nor "
                "prompt_text: the openai protocol needs one of them"
            )
        asked = {"model": model, "prompt": prompt, "max_tokens": request.output_tokens}
        return orjson.dumps(asked | _generation_fields(request, stream=stream))


class OpenAiChatFormat(_OpenAiFormat):
    """`/v1/chat/completions`: sends the messages; the server applies its chat template.

    length_field  name of the output limit: OpenAI's newer models accept only the default,
                  llama-cpp-python and similar servers only `max_tokens`
    """

    name = "openai-chat"
    path = "/v1/chat/completions"

    def __init__(self, *, length_field: str = "max_completion_tokens") -> None:
        self.length_field = length_field

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        fields = _generation_fields(request, stream=stream)
        asked = {"model": model, "messages": self.turns(request)}
        return orjson.dumps(asked | {self.length_field: request.output_tokens} | fields)


def _generation_fields(request: PlannedRequest, *, stream: bool) -> dict[str, Any]:
    """Greedy decoding; vLLM's extra fields only if the output length is forced."""
    fields: dict[str, Any] = {"temperature": 0.0, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if request.ignore_eos:
        fields["ignore_eos"] = True
        fields["min_tokens"] = request.output_tokens
    return fields


def counts_of(reply: dict[str, Any], asked: str, answered: str) -> dict[str, Any]:
    """Who answers, the counts under the API's own names, and the times of vLLM's option
    --enable-per-request-metrics; its TTFT begins when the request is scheduled."""
    usage, metrics = reply.get("usage") or {}, reply.get("metrics") or {}
    return {
        "model": reply.get("model"),
        "input_tokens": usage.get(asked),
        "output_tokens": usage.get(answered),
        "cached_tokens": (usage.get(f"{asked}_details") or {}).get("cached_tokens"),
        "reasoning_tokens": (usage.get(f"{answered}_details") or {}).get("reasoning_tokens"),
        "queue_ms": _time_ms(metrics.get("queue_time_ms")),
        "prefill_ms": _time_ms(metrics.get("time_to_first_token_ms")),
    }


def _time_ms(value: object) -> float | None:
    """A time that the server states; None if it is none: it fails no request."""
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None


def _choice_text(choice: dict[str, Any]) -> tuple[str, Any]:
    """A choice's reasoning, and its text (or content, refusal and tool calls). The choice that ends
    a response may have no delta."""
    if "text" in choice:
        return "", choice["text"] or ""
    message = choice.get("delta") or choice.get("message")
    if message is None:
        if "delta" in choice or choice.get("finish_reason"):
            return "", ""
        raise KeyError("delta")
    thought: str = message.get("reasoning") or message.get("reasoning_content") or ""
    text = message.get("content") or message.get("refusal") or ""
    if isinstance(text, list):
        thought, text = _of_parts(text)
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    for function in (message.get("function_call"), *calls):
        if function:
            text += (function.get("name") or "") + (function.get("arguments") or "")
    return thought, text


def _of_parts(parts: list[dict[str, Any]]) -> tuple[str, str]:
    """Reasoning and text of a content list, as Mistral's reasoning models send it."""
    thought = text = ""
    for part in parts:
        if part.get("type") == "thinking":
            inner = part.get("thinking") or ""
            if isinstance(inner, str):
                thought += inner
            else:
                thought += "".join(each.get("text") or "" for each in inner)
        else:
            text += part.get("text") or ""
    return thought, text
