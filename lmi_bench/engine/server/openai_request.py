"""Reads an OpenAI request, completion or chat, with vLLM's extra fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server.fields import NEUTRAL, Fields, load_json_object
from lmi_bench.engine.server.state import MAX_STOP_STRINGS
from lmi_bench.engine.server.streaming import MAX_CHOICES

DEFAULT_MAX_TOKENS = 16  # for completions; a chat may fill the context

_NEUTRAL: Mapping[str, Any] = {
    **NEUTRAL,
    "suffix": "",
    "logit_bias": {},
    "use_beam_search": False,
    "return_tokens_as_token_ids": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
_WITHOUT_EFFECT = ("user", "request_id", "priority")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class OpenAiCall:
    """One request.

    prompt            text or token ids; a chat has messages instead
    chat_options      variables for the model's chat template
    max_tokens        None: up to the end of the context
    num_choices       answers to the prompt
    echo              True to put the prompt before each answer
    sampling          without the final length, which depends on the prompt's
    include_usage     add a chunk with token counts; continuous_usage: counts in every chunk
    return_token_ids  include each chunk's token ids
    truncate          keep only this many tokens at the prompt's end
    ignored           fields without effect here
    """

    model: str | None
    max_tokens: int | None
    num_choices: int
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    keep_stop_string: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    truncate: int | None
    ignored: list[str]
    prompt: str | list[int] = ""
    messages: tuple[Message, ...] = ()
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    echo: bool = False


def read_completion_call(body: bytes, eos_token_ids: tuple[int, ...]) -> OpenAiCall:
    """Read a completion's body. Raises InputError that names the invalid field."""
    top = Fields(load_json_object(body))
    prompt = _read_prompt(top.raw("prompt"))
    max_tokens = top.integer("max_tokens", DEFAULT_MAX_TOKENS, minimum=1)
    num_logprobs = top.integer("logprobs", None, minimum=0)
    echo = top.flag("echo", False)
    if echo and num_logprobs is not None:
        raise InputError(
            "echo=true with logprobs is not supported by this server, which has no "
            "log-probabilities of prompts: omit one of them"
        )
    return _read_call(top, max_tokens, num_logprobs, eos_token_ids, prompt=prompt, echo=echo)


def read_chat_call(body: bytes, eos_token_ids: tuple[int, ...]) -> OpenAiCall:
    """Read a chat's body. Raises InputError that names the invalid field."""
    top = Fields(load_json_object(body))
    messages = _read_messages(top.raw("messages"))
    max_tokens = top.integer("max_tokens", None, minimum=1)  # the older name
    max_tokens = top.integer("max_completion_tokens", max_tokens, minimum=1)
    num_logprobs = top.integer("top_logprobs", 0, minimum=0)
    num_wanted = num_logprobs if top.flag("logprobs", False) else None
    options = top.section("chat_template_kwargs").values
    own = {"messages": messages, "chat_options": options}
    return _read_call(top, max_tokens, num_wanted, eos_token_ids, **own)


def _read_call(
    top: Fields,
    max_tokens: int | None,
    num_logprobs: int | None,
    eos_token_ids: tuple[int, ...],
    **own: Any,
) -> OpenAiCall:
    """Read the fields that completions and chats share; `own`: those of one of them.

    num_logprobs  most likely tokens per position to return; None: no log-probabilities
    """
    model = top.raw("model")
    if model is not None and not isinstance(model, str):
        raise InputError("model must be a string")
    top.refuse_unless_neutral(_NEUTRAL)
    for name in _WITHOUT_EFFECT:
        top.raw(name)
    options = top.section("stream_options")
    options.raw("include_obfuscation")
    min_tokens = top.integer("min_tokens", 0, minimum=0)
    sampling = top.vllm_sampling(
        max_new_tokens=max(1, min_tokens) if max_tokens is None else max_tokens,
        ignore_eos=top.flag("ignore_eos", False),
        eos_token_ids=eos_token_ids,
        temperature=top.number("temperature", 1.0),
        min_tokens=min_tokens,
        logprobs=num_logprobs is not None,
        top_logprobs=num_logprobs or 0,
    )
    return OpenAiCall(
        model=model,
        max_tokens=max_tokens,
        num_choices=_read_num_choices(top),
        sampling=sampling,
        stop_strings=top.strings("stop", at_most=MAX_STOP_STRINGS),
        keep_stop_string=top.flag("include_stop_str_in_output", False),
        stream=top.flag("stream", False),
        include_usage=options.flag("include_usage", False),
        continuous_usage=options.flag("continuous_usage_stats", False),
        return_token_ids=top.flag("return_token_ids", False),
        truncate=top.integer("truncate_prompt_tokens", None, minimum=1),
        ignored=top.unread() + options.unread(),
        **own,
    )


def _read_num_choices(top: Fields) -> int:
    """`n`; a larger `best_of` is not supported, since all computed choices are sent."""
    count = top.integer("n", 1, minimum=1)
    if count > MAX_CHOICES:
        raise InputError(f"n must be at most {MAX_CHOICES}, got {count}")
    best_of = top.integer("best_of", count)
    if best_of != count:
        raise InputError(
            f"best_of={best_of} with n={count} is not supported by this server: omit best_of"
        )
    return count


def _read_prompt(prompt: Any) -> str | list[int]:
    """Text or token ids, possibly in a list of one; several prompts are not supported."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InputError(
                f"prompt has {len(prompt)} prompts: this server accepts one per request"
            )
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(v) is int and v >= 0 for v in prompt):
        return prompt
    raise InputError("prompt must be a non-empty string or a non-empty list of token ids")


def _read_messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a non-empty list")
    read = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise InputError(f"messages[{number}] must be an object with a role and a content")
        read.append(Message(role, _read_content(message.get("content"), number)))
    return tuple(read)


def _read_content(content: Any, number: int) -> str:
    """A string, or a list of text parts."""
    if isinstance(content, str):
        return content
    text = ""
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InputError(f"messages[{number}].content must be a string or a list of text parts")
        text += part["text"]
    return text
