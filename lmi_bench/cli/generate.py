"""`lmi-bench generate`: text from the bundled engine, as it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.errors import InputError
from lmi_bench.jobs.settings.engine import ModelOptions, stated_settings

_SAMPLING, _SCORES = "Sampling", "Scores and checks"
_ENDS = ("eos_token", "stop_sequence", "length", "context_full")


@spread_options
def generate(
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A demo model or a Hugging Face folder.")
    ] = "demo-15m",
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text to go on from; - reads it from stdin.")
    ] = "-",
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens of one request.", rich_help_panel=_SAMPLING)
    ] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(help="Keep the k likeliest; 0: all.", rich_help_panel=_SAMPLING)
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Keep the likeliest with that mass.", rich_help_panel=_SAMPLING),
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 repeats less.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Taken from the logit of each token that the answer holds, -2 to 2.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="The same for each time that the answer holds it, -2 to 2.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Makes draws repeatable.", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text that ends it; repeatable.", rich_help_panel=_SAMPLING),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id", help="A token that ends it; repeatable.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(help="Never end before so many tokens.", rich_help_panel=_SAMPLING)
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Never end early.", rich_help_panel=_SAMPLING)
    ] = False,
    until_done: Annotated[
        bool,
        typer.Option(
            "--until-done",
            help="Ask on, request after request, until the model ends or its context is full.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False,
    confidence: Annotated[
        bool,
        typer.Option(
            "--confidence",
            help="Print exp(mean log-probability) of the tokens; models are overconfident.",
            rich_help_panel=_SCORES,
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Print each token's log-probability and those of so many of the likeliest, 0 to "
            "20.",
            rich_help_panel=_SCORES,
        ),
    ] = None,
    choices: Annotated[
        list[str] | None,
        typer.Option(
            "--choices",
            help="Rank these answers by joint log-probability instead; repeatable.",
            rich_help_panel=_SCORES,
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            metavar="FILE.jsonl",
            help="Answer questions of known answer (prompt, choices, answer a line) instead: how "
            "sure the model is, and how often right.",
            rich_help_panel=_SCORES,
        ),
    ] = None,
    expect_end: Annotated[
        list[str] | None,
        typer.Option(
            "--expect-end",
            help=f"Exit 1 unless the text ended so: {', '.join(_ENDS)}; repeatable.",
            rich_help_panel=_SCORES,
        ),
    ] = None,
    model_options: ModelOptions,
) -> None:
    """Generate text with the bundled engine: the text on stdout, figures on stderr."""
    from lmi_bench.core.scenario import parse_scenario
    from lmi_bench.engine.scheduling.sampling import SamplingParams
    from lmi_bench.jobs.generate import Wish, run

    if choices is not None and len(choices) < 2:
        raise InputError("--choices needs at least two answers to rank: --choices yes --choices no")
    unknown = [end for end in expect_end or () if end not in _ENDS]
    if unknown:
        raise InputError(f"--expect-end {unknown[0]}: use {', '.join(_ENDS)}")
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop_token_ids=tuple(stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        logprobs=confidence or logprobs is not None,
        top_logprobs=logprobs or 0,
    )
    if "" in (stop or ()):
        raise InputError("--stop '': an empty text would end every answer; leave it out")
    settings = parse_scenario({"engine": stated_settings(model_options)}, source="generate").engine
    wish = Wish(
        prompt,
        sampling,
        tuple(stop or ()),
        until_done=until_done,
        confidence=confidence,
        show_logprobs=logprobs is not None,
        expected_ends=tuple(expect_end or ()),
    )
    code = run(model, settings, wish, choices=tuple(choices or ()), questions=questions)
    raise typer.Exit(code)
