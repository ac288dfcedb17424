"""Reading an OpenAI completion request, with vLLM's extra fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server.fields import Fields, load_json_object
from lmi_bench.engine.server.state import MAX_STOP_STRINGS
from lmi_bench.errors import InputError

DEFAULT_MAX_TOKENS = 16

_NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_p": 0,
    "length_penalty": 1,
    "logit_bias": {},
    "use_beam_search": False,
    "prompt_logprobs": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
}
_WITHOUT_EFFECT = ("user", "request_id", "priority")


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One `/v1/completions` request.

    prompt            text or token ids
    include_usage     one more chunk with the token counts; continuous_usage: counts on every chunk
    return_token_ids  name each chunk's token ids
    logprobs          return the log-probability of each token
    ignored           fields that mean nothing here
    """

    model: str | None
    prompt: str | list[int]
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    truncate: int | None
    ignored: list[str]

    @property
    def logprobs(self) -> bool:
        """Whether the reply holds log-probabilities."""
        return self.sampling.logprobs


def read_completion_call(body: bytes, eos_token_ids: tuple[int, ...]) -> CompletionCall:
    """Read the body. Raises InputError naming the field that is wrong."""
    top = Fields(load_json_object(body))
    model = top.raw("model")
    if model is not None and not isinstance(model, str):
        raise InputError("model must be a string")
    top.refuse_unless_neutral(_NEUTRAL)
    for name in _WITHOUT_EFFECT:
        top.raw(name)
    stream = top.flag("stream", False)
    options = top.section("stream_options")
    options.raw("include_obfuscation")
    return CompletionCall(
        model=model,
        prompt=_read_prompt(top.raw("prompt")),
        sampling=_read_sampling(top, eos_token_ids),
        stop_strings=top.strings("stop", at_most=MAX_STOP_STRINGS),
        stream=stream,
        include_usage=options.flag("include_usage", False),
        continuous_usage=options.flag("continuous_usage_stats", False),
        return_token_ids=top.flag("return_token_ids", False),
        truncate=top.optional_integer("truncate_prompt_tokens", minimum=1),
        ignored=top.unread() + options.unread(),
    )


def _read_prompt(prompt: Any) -> str | list[int]:
    """Text or token ids, also in a list of one. Several prompts a request are not supported."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InputError(
                f"prompt holds {len(prompt)} prompts: this server takes one in a request"
            )
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(v) is int and v >= 0 for v in prompt):
        return prompt
    raise InputError("prompt must be a non-empty string or a non-empty list of token ids")


def _read_sampling(top: Fields, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """The sampling. Only the chosen token's log-probability is known, so `logprobs` is 0, or 1
    where the chosen token is the likeliest.
    """
    temperature = top.number("temperature", 1.0)
    logprobs = top.optional_integer("logprobs", minimum=0)
    if logprobs is not None and logprobs > (1 if temperature == 0 else 0):
        raise InputError(
            f"logprobs={logprobs} is not supported: 0 gives the chosen token's log-probability, "
            "1 needs temperature 0"
        )
    return SamplingParams(
        max_new_tokens=top.integer("max_tokens", DEFAULT_MAX_TOKENS),
        ignore_eos=top.flag("ignore_eos", False),
        eos_token_ids=eos_token_ids,
        stop_token_ids=top.token_ids("stop_token_ids", at_most=MAX_STOP_STRINGS),
        temperature=temperature,
        top_k=max(0, top.integer("top_k", 0, minimum=-1)),
        top_p=top.number("top_p", 1.0),
        repetition_penalty=top.number("repetition_penalty", 1.0),
        min_tokens=top.integer("min_tokens", 0, minimum=0),
        seed=top.optional_integer("seed", minimum=0),
        logprobs=logprobs is not None,
    )
