"""Reads a TGI request (`inputs`, `parameters`, `stream`) with TGI 3's defaults and errors.

As in TGI, a malformed body is rejected with a status, and an out-of-range value with a validation
error, which a stream sends as an event.
Source: router/src/lib.rs and router/src/validation.rs of text-generation-inference 3.
"""

import operator
import secrets
from typing import Any, ClassVar, Final

from pydantic import NonNegativeInt

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.scheduling.sampling import MOST_TOP_LOGPROBS, SamplingParams
from lmi_bench.engine.server.fields import Fields, Strings
from lmi_bench.engine.server.state import MAX_STOP_STRINGS
from lmi_bench.models.hf_config import read_table

MAX_BEST_OF: Final = 2
_SEED_BITS: Final = 63
_RANGES: Final = read_table("tgi_ranges.csv", __package__)
"""`low` and `high` of values, in TGI's order, and the message for others; `of`: for this reply."""
_IS: Final = {"<": operator.lt, "<=": operator.le}


class TgiParameters(Fields):
    """The fields of `parameters`; None: the default depends on the others.

    max_new_tokens    None: up to the end of the context
    return_full_text  None: the path's default
    """

    best_of: NonNegativeInt | None = None
    temperature: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: NonNegativeInt | None = None
    return_full_text: bool | None = None
    stop: Strings = ()  # limited in check_values
    truncate: NonNegativeInt | None = None
    details: bool = False
    decoder_input_details: bool = False
    seed: NonNegativeInt | None = None
    top_n_tokens: NonNegativeInt = 0
    adapter_id: Any = None
    grammar: Any = None
    watermark: bool = False


class TgiBody(Fields):
    """A well-formed request whose values have not been checked.

    Without `parameters` TGI samples; with any parameters it decodes greedily.
    """

    section = "parameters"
    inputs: str
    parameters: TgiParameters = TgiParameters(do_sample=True)
    stream: bool = False
    repeats_prompt: ClassVar = False  # what the path does by default

    @property
    def prefix(self) -> str:
        """Text before the generated text: the prompt, or empty."""
        wish = self.parameters.return_full_text
        return self.inputs if (self.repeats_prompt if wish is None else wish) else ""


class TgiCompatBody(TgiBody):
    """A request to `/`."""

    repeats_prompt: ClassVar = True


def check_values(body: TgiBody, longest: int, reply: str) -> None:
    """Raises InputError for out-of-range values, with TGI's messages and order.

    longest  most tokens of a prompt
    reply    stream or whole: some values are of one kind alone
    """
    asked = body.parameters
    drawn = (asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    several = (asked.best_of or 1) > 1
    sampled = asked.do_sample or any(value is not None for value in drawn)
    named = {"stops": MAX_STOP_STRINGS, "ranked": MOST_TOP_LOGPROBS, "answers": MAX_BEST_OF, "longest": longest}
    values = vars(asked) | {
        "unsampled": several and not sampled,
        "seeded": several and asked.seed is not None,
        "num_stops": len(asked.stop),
        "num_characters": len(body.inputs),
        "has_typical_p": asked.typical_p is not None,
        "has_grammar": asked.grammar is not None,
        "has_adapter_id": asked.adapter_id is not None,
    }
    for row in _RANGES:
        value, high = values[row["value"]], named.get(row["high"], row["high"])
        if value is None or row["of"] not in ("", reply):
            continue
        is_above = _IS[row["above"]](float(row["low"]), value)
        if not (is_above and _IS[row["below"]](value, float(high))):
            raise InputError(row["message"].format(value=value, high=high))


def read_length(wanted: int | None, num_inputs: int, longest: int, total: int) -> int:
    """The output limit after `num_inputs` tokens, of which `max_new_tokens` are wanted.

    Raises CapacityError if these are more than `longest`, or all more than `total`.
    """
    if wanted is None:
        wanted = max(0, total - num_inputs)
    if num_inputs + wanted > total:
        raise CapacityError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {num_inputs} `inputs` "
            f"tokens and {wanted} `max_new_tokens`"
        )
    if num_inputs > longest:
        raise CapacityError(f"`inputs` must have less than {longest} tokens. Given: {num_inputs}")
    return wanted


def read_sampling(
    asked: TgiParameters, max_new_tokens: int, eos_token_ids: tuple[int, ...], *, logprobs: bool
) -> SamplingParams:
    """The sampling settings of checked parameters.

    A temperature, top_k or top_p other than the default implies sampling, whatever `do_sample`
    says. Sampling without a seed gets a random one, so that the reply can state it.
    """
    temperature, top_k, top_p = asked.temperature or 1.0, asked.top_k or 0, asked.top_p or 1.0
    sampled = asked.do_sample or (temperature, top_k, top_p) != (1.0, 0, 1.0)
    seed = secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        temperature=temperature if sampled else 0.0,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty,
        seed=seed if sampled else None,
        logprobs=logprobs,
        prompt_logprobs=asked.decoder_input_details,
        top_logprobs=asked.top_n_tokens if logprobs else 0,
    )
