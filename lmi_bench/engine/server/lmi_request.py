"""Reads an LMI request (`inputs`, `parameters`, `stream`) with djl-serving's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server.fields import Fields
from lmi_bench.engine.server.state import MAX_STOP_STRINGS

DEFAULT_MAX_NEW_TOKENS = 30

# unsupported parameters of other backends: accepted if the value has no effect
_NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "num_beams": 1,
    "min_p": 0,
    "typical_p": 1,
    "length_penalty": 1,
    "early_stopping": False,
    "watermark": False,
    "decoder_input_details": False,
    "prompt_logprobs": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


@dataclass(frozen=True, slots=True)
class LmiCall:
    """One `/invocations` request.

    truncate          keep only this many tokens at the prompt's end
    return_full_text  put the prompt before the generated text
    ignored           fields without effect here
    """

    inputs: str
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    keep_stop_string: bool
    stream: bool
    details: bool
    return_full_text: bool
    truncate: int | None
    ignored: list[str]


def read_lmi_call(body: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> LmiCall:
    """Read a decoded body. Raises InputError that names the invalid field."""
    top = Fields(body)
    inputs = top.raw("inputs")
    if not isinstance(inputs, str) or not inputs:
        raise InputError("inputs must be a non-empty string (a list needs dynamic batching)")
    parameters = top.section("parameters")
    parameters.refuse_unless_neutral(_NEUTRAL)
    stop_strings = tuple(
        stop
        for name in ("stop_sequences", "stop")
        for stop in parameters.strings(name, at_most=MAX_STOP_STRINGS)
    )
    details = parameters.flag("details", False)
    stream = top.flag("stream", False)
    top_n_tokens = parameters.integer("top_n_tokens", 0, minimum=0)
    sampling = _read_sampling(
        parameters,
        eos_token_ids,
        logprobs=details or stream,
        top_logprobs=top_n_tokens if details and not stream else 0,
    )
    return LmiCall(
        inputs=inputs,
        sampling=sampling,
        stop_strings=stop_strings,
        keep_stop_string=parameters.flag("include_stop_str_in_output", False),
        stream=stream,
        details=details,
        return_full_text=parameters.flag("return_full_text", False),
        truncate=parameters.optional_integer("truncate", minimum=1),
        ignored=top.unread() + parameters.unread(),
    )


def _read_sampling(
    parameters: Fields, eos_token_ids: tuple[int, ...], *, logprobs: bool, top_logprobs: int
) -> SamplingParams:
    """The sampling settings; without `do_sample`, a temperature, top_k or top_p implies sampling,
    as in LMI since 0.32.
    """
    do_sample = parameters.raw("do_sample")
    if do_sample is None:
        do_sample = any(parameters.raw(name) for name in ("temperature", "top_k", "top_p"))
    else:
        do_sample = parameters.flag("do_sample", False)
    ignore_eos = parameters.flag("ignore_eos_token", False)
    ignore_eos = parameters.flag("ignore_eos", ignore_eos)
    min_tokens = parameters.integer("min_new_tokens", 0, minimum=0)
    return SamplingParams(
        max_new_tokens=parameters.integer("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        ignore_eos=ignore_eos,
        eos_token_ids=eos_token_ids,
        stop_token_ids=parameters.token_ids("stop_token_ids", at_most=MAX_STOP_STRINGS),
        temperature=parameters.number("temperature", 1.0) if do_sample else 0.0,
        top_k=max(0, parameters.integer("top_k", 0, minimum=-1)),
        top_p=parameters.number("top_p", 1.0),
        repetition_penalty=parameters.number("repetition_penalty", 1.0),
        presence_penalty=parameters.number("presence_penalty", 0.0),
        frequency_penalty=parameters.number("frequency_penalty", 0.0),
        min_tokens=parameters.integer("min_tokens", min_tokens, minimum=0),
        seed=parameters.seed("seed"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )
