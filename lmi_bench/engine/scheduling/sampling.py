"""One request's generation settings: sampling, penalties and stop conditions."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option

MOST_TOP_LOGPROBS: Final = 20  # maximum `top_logprobs` per token, as in vLLM and OpenAI

STRONGEST_PENALTY: Final = 2.0
"""Limit of `presence_penalty` and `frequency_penalty`, positive or negative, as in OpenAI."""

LEAST_TEMPERATURE: Final = 1e-5
"""A lower temperature counts as 0, as in vLLM: dividing logits by less overflows float32."""

Ranked = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with natural log-probabilities, most likely first."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must follow: llguidance's `text`, over the tokens of the model in `folder`."""

    text: str
    folder: Path
    vocab_size: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Generation settings of one request; the defaults are greedy decoding.

    max_new_tokens  reached, the finish reason is `length`
    temperature     divisor of the logits; below LEAST_TEMPERATURE decoding is greedy
    repetition_penalty  applies to tokens in the prompt or output; the others ignore the prompt
    logprobs        return the log-probability of each generated token
    top_logprobs    also return those of this many most likely tokens per position
    eos_token_ids   end the sequence with reason `eos_token`, unless `ignore_eos`
    stop_token_ids  end it with reason `stop_sequence`
    prompt_logprobs return those of the prompt's tokens as well, with the first token
    grammar         that the answer must follow
    min_p           least probability, as a share of the likeliest token's
    logit_bias      added to the logits of these tokens, -100 to 100
    penalised       True if earlier tokens or a bias change the logits; derived from the rest
    """

    GROUP: ClassVar = "Sampling"

    max_new_tokens: int = option("Maximum tokens of one request.", value=16)
    temperature: float = option("Sampling temperature; 0 takes the likeliest token.", value=0.0)
    top_k: int = option("Number of likeliest tokens to draw from; 0: all.", value=0)
    top_p: float = option("Probability mass of the likeliest tokens to draw from.", value=1.0)
    repetition_penalty: float = option("Repetition penalty; above 1 repeats less.", value=1.0)
    presence_penalty: float = option(
        "Penalty, -2 to 2, on the logit of each token that the answer contains.", value=0.0
    )
    frequency_penalty: float = option(
        "Penalty, -2 to 2, on a token's logit for each time it occurs in the answer.", value=0.0
    )
    seed: int | None = option("Random seed; the same seed draws the same text.")
    stop_token_ids: tuple[int, ...] = option("Token id that ends the text; repeatable.", "--stop-token-id", value=())
    min_tokens: int = option("Minimum number of tokens before the text may end.", value=0)
    ignore_eos: bool = option("Generation beyond the model's end token.", value=False)
    eos_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # a field, since every step reads it for every row
    penalised: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature <= 1e6:  # float32 must hold what is computed with it
            raise InputError(f"temperature must be 0 or more, up to 1e6: {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p:g}")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p must be between 0 and 1, got {self.min_p:g}")
        if min(self.stop_token_ids, default=0) < 0:
            raise InputError(f"a token id must be 0 or more, got {min(self.stop_token_ids)}")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise InputError(f"repetition_penalty must be 1e-6 to 1e6: {self.repetition_penalty:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -STRONGEST_PENALTY <= value <= STRONGEST_PENALTY:
                raise InputError(
                    f"{name} must be between {-STRONGEST_PENALTY:g} and {STRONGEST_PENALTY:g}, got {value:g}"
                )
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise InputError(f"top_logprobs must be between 0 and {MOST_TOP_LOGPROBS}, got {self.top_logprobs}")
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise InputError(
                f"min_tokens must be between 0 and max_new_tokens {self.max_new_tokens}, got {self.min_tokens}"
            )
        changed = self.repetition_penalty != 1.0 or self.counts_answer or bool(self.logit_bias)
        object.__setattr__(self, "penalised", changed)

    @property
    def counts_answer(self) -> bool:
        """True if a token's logit depends on its count in the output."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature < LEAST_TEMPERATURE
