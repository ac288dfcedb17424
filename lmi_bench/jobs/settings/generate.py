"""What `generate` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.engine import ModelOptions

ENDS: Final = ("eos_token", "stop_sequence", "length", "context_full")
_SAMPLING: Final = "Sampling"
_SCORES: Final = "Scores and checks"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn, and where the text ends."""

    GROUP: ClassVar = _SAMPLING

    max_new_tokens: Annotated[int, Option("Most tokens of one request.")] = 256
    temperature: Annotated[float, Option("Sampling temperature; 0 takes the likeliest token.")] = (
        0.0
    )
    top_k: Annotated[int, Option("Number of likeliest tokens to draw from; 0: all.")] = 0
    top_p: Annotated[float, Option("Probability mass of the likeliest tokens to draw from.")] = 1.0
    repetition_penalty: Annotated[float, Option("Repetition penalty; above 1 repeats less.")] = 1.0
    presence_penalty: Annotated[
        float, Option("Penalty, -2 to 2, on the logit of each token that the answer holds.")
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option("Penalty, -2 to 2, on a token's logit for each time that the answer holds it."),
    ] = 0.0
    seed: Annotated[int | None, Option("Random seed; the same seed draws the same text.")] = None
    stop_token_ids: Annotated[
        tuple[int, ...], Option("Token id that ends the text; repeatable.", ("--stop-token-id",))
    ] = ()
    min_tokens: Annotated[int, Option("Fewest tokens before the text may end.")] = 0
    ignore_eos: Annotated[
        bool, Option("The model's end token does not end the text.", ("--ignore-eos",))
    ] = False


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """A prompt for a model, how to go on from it, or which answers to score instead."""

    model: Annotated[str, Option("Demo model or Hugging Face folder.", ("--model", "-m"))] = (
        "demo-15m"
    )
    prompt: Annotated[
        str, Option("Text to go on from; - reads it from stdin.", ("--prompt", "-p"))
    ] = "-"
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: Annotated[
        tuple[str, ...], Option("Text that ends the answer; repeatable.", group=_SAMPLING)
    ] = ()
    until_done: Annotated[
        bool,
        Option(
            "Further requests go on with the text until the model ends it or its context is full.",
            ("--until-done",),
            group=_SAMPLING,
        ),
    ] = False
    confidence: Annotated[
        bool,
        Option(
            "Print exp(mean log-probability) of the tokens; models are overconfident.",
            ("--confidence",),
            group=_SCORES,
        ),
    ] = False
    logprobs: Annotated[
        int | None,
        Option(
            "Number of likeliest tokens, 0 to 20, to print with each token's log-probability.",
            group=_SCORES,
        ),
    ] = None
    choices: Annotated[
        tuple[str, ...],
        Option(
            "Answer to rank by joint log-probability, instead of a generated text; repeatable.",
            group=_SCORES,
        ),
    ] = ()
    questions: Annotated[
        Path | None,
        Option(
            "Questions with known answers (prompt, choices and answer in each line) to score "
            "instead: how sure the model is, and how often right.",
            metavar="FILE.jsonl",
            group=_SCORES,
        ),
    ] = None
    expect_end: Annotated[
        tuple[str, ...],
        Option(
            f"Expected end of the text: {', '.join(ENDS)}; repeatable. Exit 1 at another.",
            group=_SCORES,
        ),
    ] = ()
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
