"""Reads a TGI request (`inputs`, `parameters`, `stream`) with TGI 3's defaults and errors.

As in TGI, a malformed body is rejected with a status, and an out-of-range value with a validation
error, which a stream sends as an event.
Source: router/src/lib.rs and router/src/validation.rs of text-generation-inference 3.
"""

import secrets
import sys
from dataclasses import dataclass
from typing import Any, Final

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.scheduling.sampling import MOST_TOP_LOGPROBS, SamplingParams
from lmi_bench.engine.server.fields import Fields, given, load_json_object
from lmi_bench.engine.server.state import MAX_STOP_STRINGS

MAX_BEST_OF: Final = 2
_SEED_BITS: Final = 63
_NUMBERS: Final = ("temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p")
_COUNTS: Final = ("best_of", "max_new_tokens", "truncate", "seed", "top_n_tokens")


@dataclass(frozen=True, slots=True)
class TgiLimits:
    """The limits that `/info` states and requests must meet, in tokens."""

    max_input_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class TgiBody:
    """A well-formed request whose values have not been checked.

    return_full_text  None: the path's default
    max_new_tokens    None: up to the end of the context
    unsupported       error message for a parameter that this server lacks
    ignored           fields without effect here
    """

    inputs: str
    stream: bool
    best_of: int | None
    temperature: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    top_k: int | None
    top_p: float | None
    typical_p: float | None
    do_sample: bool
    max_new_tokens: int | None
    return_full_text: bool | None
    stop: tuple[str, ...]
    truncate: int | None
    details: bool
    decoder_input_details: bool
    seed: int | None
    top_n_tokens: int | None
    unsupported: str | None
    ignored: list[str]

    @property
    def prefix(self) -> str:
        """Text before the generated text: the prompt, or empty."""
        return self.inputs if self.return_full_text else ""


def read_tgi_body(body: bytes) -> TgiBody:
    """Read a request. Raises InputError that names the malformed field."""
    top = Fields(load_json_object(body))
    inputs = top.raw("inputs")
    if not isinstance(inputs, str):
        raise InputError("inputs must be a string")
    parameters = top.section("parameters")
    numbers: dict[str, Any] = {name: parameters.number(name, None) for name in _NUMBERS}
    counts: dict[str, Any] = {name: parameters.integer(name, None, minimum=0) for name in _COUNTS}
    return TgiBody(
        inputs=inputs,
        stream=top.flag("stream", False),
        top_k=parameters.integer("top_k", None),
        # without `parameters` TGI samples; with any parameters it decodes greedily
        do_sample=parameters.flag("do_sample", top.raw("parameters") is None),
        return_full_text=parameters.flag("return_full_text", None),
        stop=parameters.strings("stop", at_most=sys.maxsize),  # limited in check_values
        details=parameters.flag("details", False),
        decoder_input_details=parameters.flag("decoder_input_details", False),
        unsupported=_unsupported(parameters),
        **numbers,
        **counts,
        ignored=top.unread() + parameters.unread(),
    )


def check_stream(body: TgiBody) -> None:
    """Raises InputError for settings that a stream does not support."""
    if body.best_of not in (None, 1):
        raise InputError("`best_of` != 1 is not supported when streaming tokens")
    if body.decoder_input_details:
        raise InputError("`decoder_input_details` == true is not supported when streaming tokens")


def num_answers(body: TgiBody) -> int:
    """Number of answers to generate for `best_of`. Raises InputError as TGI does."""
    count = given(body.best_of, 1)
    if count > MAX_BEST_OF:
        raise InputError(f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {count}")
    return max(1, count)


def check_values(body: TgiBody, limits: TgiLimits) -> None:
    """Raises InputError for out-of-range values, with TGI's messages and order."""
    drawn = (body.temperature, body.top_k, body.top_p, body.typical_p)
    wants_several = body.best_of is not None and body.best_of > 1
    truncate = body.truncate
    for refused, message in (
        (
            wants_several and not body.do_sample and all(value is None for value in drawn),
            "you must use sampling when `best_of` is > 1",
        ),
        (_not_above_0(body.temperature), "`temperature` must be strictly positive"),
        (_not_above_0(body.repetition_penalty), "`repetition_penalty` must be strictly positive"),
        (
            body.frequency_penalty is not None and not -2 <= body.frequency_penalty <= 2,
            "`frequency_penalty` must be >= -2.0 and <= 2.0",
        ),
        (_not_a_share(body.top_p), "`top_p` must be > 0.0 and < 1.0"),
        (_not_a_share(body.typical_p), "`typical_p` must be > 0.0 and < 1.0"),
        (_not_above_0(body.top_k), "`top_k` must be strictly positive"),
        (body.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"),
        (
            len(body.stop) > MAX_STOP_STRINGS,
            f"`stop` supports up to {MAX_STOP_STRINGS} stop sequences. Given: {len(body.stop)}",
        ),
        (wants_several and body.seed is not None, "`seed` must not be set when `best_of` > 1"),
        (
            (body.top_n_tokens or 0) > MOST_TOP_LOGPROBS,
            f"`top_n_tokens` must be >= 0 and <= {MOST_TOP_LOGPROBS}. Given: {body.top_n_tokens}",
        ),
        (not body.inputs, "`inputs` cannot be empty"),
        (
            truncate is not None and not 0 < truncate <= limits.max_input_tokens,
            f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. "
            f"Given: {truncate}",
        ),
        (body.unsupported is not None, body.unsupported),
        (
            body.decoder_input_details,
            "`decoder_input_details` is not supported by this server, which has no "
            "log-probabilities of prompts",
        ),
    ):
        if refused:
            raise InputError(message)


def read_length(body: TgiBody, num_inputs: int, limits: TgiLimits) -> int:
    """The output limit after `num_inputs` tokens. Raises CapacityError if they do not fit."""
    total, wanted = limits.max_total_tokens, body.max_new_tokens
    if wanted is None:
        wanted = max(0, total - num_inputs)
    if num_inputs + wanted > total:
        raise CapacityError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {num_inputs} `inputs` "
            f"tokens and {wanted} `max_new_tokens`"
        )
    if num_inputs > limits.max_input_tokens:
        raise CapacityError(
            f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {num_inputs}"
        )
    return wanted


def read_sampling(
    body: TgiBody, max_new_tokens: int, eos_token_ids: tuple[int, ...], *, logprobs: bool
) -> SamplingParams:
    """The sampling settings of a checked body.

    A temperature, top_k or top_p other than the default implies sampling, whatever `do_sample`
    says. Sampling without a seed gets a random one, so that the reply can state it.
    """
    temperature, top_p = given(body.temperature, 1.0), given(body.top_p, 1.0)
    top_k = body.top_k or 0
    sampled = body.do_sample or temperature != 1.0 or top_k > 0 or top_p < 1.0
    seed = None
    if sampled:
        seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        temperature=temperature if sampled else 0.0,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=given(body.repetition_penalty, 1.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        seed=seed,
        logprobs=logprobs,
        top_logprobs=(body.top_n_tokens or 0) if logprobs else 0,
    )


def _unsupported(parameters: Fields) -> str | None:
    """The error message for a parameter that this server does not support, if any."""
    found = None
    if parameters.raw("adapter_id") is not None:
        found = "`adapter_id` is not supported by this server, which has no adapters"
    if parameters.raw("grammar") is not None:
        found = "grammar is not supported"
    if parameters.flag("watermark", False):
        found = "`watermark` is not supported by this server"
    if parameters.raw("typical_p") not in (None, 1):
        found = "`typical_p` is not supported by this server"
    return found


def _not_above_0(value: float | None) -> bool:
    return value is not None and not value > 0


def _not_a_share(value: Any) -> bool:
    return value is not None and not 0 < value < 1
