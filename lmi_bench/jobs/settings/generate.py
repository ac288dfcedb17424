"""What `generate` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option
from lmi_bench.jobs.settings.engine import ModelOptions

ENDS: Final = ("eos_token", "stop_sequence", "length", "context_full")
_SAMPLING: Final = "Sampling"
_SCORES: Final = "Scores and checks"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn, and where the text ends."""

    GROUP: ClassVar = _SAMPLING

    max_new_tokens: int = option("Most tokens of one request.", value=256)
    temperature: float = option("Sampling temperature; 0 takes the likeliest token.", value=0.0)
    top_k: int = option("Number of likeliest tokens to draw from; 0: all.", value=0)
    top_p: float = option("Probability mass of the likeliest tokens to draw from.", value=1.0)
    repetition_penalty: float = option("Repetition penalty; above 1 repeats less.", value=1.0)
    presence_penalty: float = option(
        "Penalty, -2 to 2, on the logit of each token that the answer holds.", value=0.0
    )
    frequency_penalty: float = option(
        "Penalty, -2 to 2, on a token's logit for each time that the answer holds it.", value=0.0
    )
    seed: int | None = option("Random seed; the same seed draws the same text.")
    stop_token_ids: tuple[int, ...] = option(
        "Token id that ends the text; repeatable.", "--stop-token-id", value=()
    )
    min_tokens: int = option("Fewest tokens before the text may end.", value=0)
    ignore_eos: bool = option(
        "The model's end token does not end the text.", "--ignore-eos", value=False
    )


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """A prompt for a model, how to go on from it, or which answers to score instead."""

    model: str = option("Demo model or Hugging Face folder.", "--model", "-m", value="demo-15m")
    prompt: str = option("Text to go on from; - reads it from stdin.", "--prompt", "-p", value="-")
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = option(
        "Text that ends the answer; repeatable.", value=(), group=_SAMPLING
    )
    until_done: bool = option(
        "Further requests go on with the text until the model ends it or its context is full.",
        "--until-done",
        value=False,
        group=_SAMPLING,
    )
    confidence: bool = option(
        "Print exp(mean log-probability) of the tokens; models are overconfident.",
        "--confidence",
        value=False,
        group=_SCORES,
    )
    logprobs: int | None = option(
        "Number of likeliest tokens, 0 to 20, to print with each token's log-probability.",
        group=_SCORES,
    )
    choices: tuple[str, ...] = option(
        "Answer to rank by joint log-probability, instead of a generated text; repeatable.",
        value=(),
        group=_SCORES,
    )
    questions: Path | None = option(
        "Questions with known answers (prompt, choices and answer in each line) to score "
        "instead: how sure the model is, and how often right.",
        metavar="FILE.jsonl",
        group=_SCORES,
    )
    expect_end: tuple[str, ...] = option(
        f"Expected end of the text: {', '.join(ENDS)}; repeatable. Exit 1 at another.",
        value=(),
        group=_SCORES,
    )
    model_options: ModelOptions = field(default_factory=ModelOptions)

    def __post_init__(self) -> None:
        if len(self.choices) == 1:
            raise InputError(
                "--choices needs at least two answers to rank: --choices yes --choices no"
            )
        for end in self.expect_end:
            if end not in ENDS:
                raise InputError(f"--expect-end {end}: use {', '.join(ENDS)}")
        if "" in self.stop:
            raise InputError("--stop '': an empty text would end every answer; leave it out")
