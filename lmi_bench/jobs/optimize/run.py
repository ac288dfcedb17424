"""An optimization job: measures each variant of a recipe, writes its report and artefacts."""

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.analysis.results.confidence import text_perplexity
from lmi_bench.analysis.results.repeats import pooled_run, spread
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.durable import write_inside
from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.run_store import Run
from lmi_bench.core.scenario import EngineSection, Scenario, parse_scenario
from lmi_bench.core.units import s_to_ms
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server.answer import Prompt
from lmi_bench.engine.texts import EVALUATION, read_text
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.jobs.optimize.recipe import BASELINE, BASELINE_AGAIN, Evaluation, Recipe, Variant, stated_recipe
from lmi_bench.jobs.settings.bundled import OptimizeSettings
from lmi_bench.jobs.sweep.run import only, sweep_scenario
from lmi_bench.loadgen.prompts.prompts import load_dataset
from lmi_bench.models.folder import held_out_text, make_new_folder
from lmi_bench.report.html import render_html
from lmi_bench.report.optimization import VariantMemory, VariantQuality, VariantResult, optimization_tables
from lmi_bench.report.view import build_view
from lmi_bench.targets.bundled import open_torch_engine, round_weights
from lmi_bench.targets.parts import EngineParts, close_all
from lmi_bench.targets.prompts import find_tokenizer

_WINDOW_TOKENS: Final = 256


def measure_quality(
    parts: EngineParts, text_ids: Sequence[int], prompts: Sequence[Prompt]
) -> tuple[list[float], list[tuple[int, ...]], float | None]:
    """Score the text window by window, then generate; the engine is closed afterwards.

    Returns the natural log-probability of each token of the text after those before it, the greedy
    tokens of each request, and the share of drafted tokens that held (None without a draft).
    """
    try:
        scores = asyncio.run(_score(parts, text_ids))
    except BaseException:
        asyncio.run(close_all(parts.executors))
        raise
    return scores, *asyncio.run(_generate(parts, prompts))


def measure_products(parts: EngineParts, concurrency: Sequence[int]) -> dict[int, float]:
    """Seconds of a decode step's matrix products, by the number of sequences; empty if they cannot
    be timed. Call it before `measure_quality`."""
    sizes = sorted({min(concurrency), max(concurrency)})
    times = {rows: asyncio.run(parts.loaded.time_products(rows)) for rows in sizes}
    return {rows: time_s for rows, time_s in times.items() if time_s is not None}


async def _score(parts: EngineParts, text_ids: Sequence[int]) -> list[float]:
    room = parts.config.num_blocks * parts.config.block_size
    length = min(_WINDOW_TOKENS, parts.config.max_model_len, room)
    scores: list[float] = []
    for start in range(0, len(text_ids) - 1, length):
        window = text_ids[start : start + length]
        if len(window) > 1:
            scores += await parts.loaded.score(window[:1], window[1:])
    return scores


async def _generate(parts: EngineParts, prompts: Sequence[Prompt]) -> tuple[list[tuple[int, ...]], float | None]:
    """Greedy tokens of each prompt, and the share of drafted ones that held."""
    outputs, drafted, accepted = [], 0, 0
    async with parts.engine() as engine:
        running = [engine.submit(prompt.token_ids, prompt.sampling) for prompt in prompts]
        for generation in running:
            await generation.wait()
            tokens = tuple(t for event in generation.events for t in event.token_ids)
            if not tokens:
                raise EngineError(f"a request of {len(prompts)} gave no token")
            outputs.append(tokens)
            drafted += generation.drafted_tokens
            accepted += generation.accepted_tokens
    return outputs, accepted / drafted if drafted else None


def agreement_frac(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Mean over requests of the share of tokens before the first that differs, 0 to 1.

    Tokens after it continue different texts and are not comparable.
    """
    shares = []
    for mine, theirs in zip(outputs, reference, strict=True):
        same = next(
            (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        shares.append(same / max(len(mine), len(theirs)))
    return math.fsum(shares) / len(shares)


def score_shift(scores: Sequence[float], reference: Sequence[float]) -> float:
    """Mean |difference| of the log-probabilities of the same tokens: 0 for the same model."""
    pairs = zip(scores, reference, strict=True)
    return math.fsum(abs(a - b) for a, b in pairs) / len(scores)


TECHNIQUES: Final = read_rows("techniques.csv", "jobs")
"""Settings of a recipe's engine, each with what it does and where it runs."""

_MOST_SWEEPS = 3  # of a variant, while one of its levels is invalid


@dataclass(slots=True)
class MeasuredVariant:
    """Measurements of one variant; `scores`, `outputs` and `accepted_frac` of `measure_quality`.

    stages_s   duration of each stage, by the names in `STAGES`
    rounds     its sweeps; none if its arithmetic is only emulated
    product_s  duration of a decode step's matrix products, by sequences
    """

    name: str
    settings: EngineSection
    parts: EngineParts
    scores: list[float]
    outputs: list[tuple[int, ...]]
    accepted_frac: float | None
    stages_s: dict[str, float]
    rounds: list[Run] = field(default_factory=list)
    product_s: dict[int, float] = field(default_factory=dict)
    layer_errors: dict[str, float] = field(default_factory=dict)
    saved: Path | None = None

    @property
    def run(self) -> Run | None:
        """All sweeps as one run, its levels with the requests of every round."""
        if not self.rounds:
            return None
        levels = [line for run in self.rounds for line in run.levels]
        records = [sent for run in self.rounds for sent in run.records]
        return pooled_run(replace(self.rounds[0], levels=levels, records=records))


def optimize(settings: OptimizeSettings, listener: Listener = SILENT) -> tuple[Path, list[VariantResult]]:
    """Measure every variant and write the folder; raises InputError before a model is loaded.

    Returns the folder, and the variants, the baseline first.
    """
    recipe = stated_recipe(settings)
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S-optimize")
    folder = settings.out or Path("runs") / stamp
    if folder.exists():
        raise InputError(f"{folder} exists: name another folder with --out")
    data = _data(recipe)
    make_new_folder(folder)
    recipe = _with_known_prompts(recipe, folder)
    measured: list[MeasuredVariant] = []
    for variant in (None, *recipe.variants):
        each = _measure(recipe, variant, data, listener)
        if variant is not None and each.parts.quantized is not None:
            _keep_artefacts(recipe, variant, each, folder, listener)
        measured.append(each)
    # the baseline against itself: what the machine alone does to a ratio
    again = dict.fromkeys(measured[0].stages_s, 0.0)
    measured.append(replace(measured[0], name=BASELINE_AGAIN, rounds=[], stages_s=again))
    _sweep_in_rounds(recipe, measured, folder, listener)
    results = [_result(each, measured[0], recipe.evaluate) for each in measured]
    results = [replace(each, undecided=undecided_levels(each, results)) for each in results]
    rows = [asdict(result) for result in results]
    content = {"model": recipe.model, "recipe": recipe.model_dump(mode="json"), "variants": rows}
    write_inside(folder / "optimize.json", json.dumps(content, indent=2) + "\n")
    swept = [(each.run, each.name) for each in measured if each.run is not None]
    view = build_view(
        [run for run, _ in swept],
        labels=[name for _, name in swept],
        title=f"{Path(recipe.model).name}: {len(recipe.variants)} variants",
        tables=optimization_tables(results),
    )
    write_inside(folder / "report.html", render_html(view))
    return folder, results


def _with_known_prompts(recipe: Recipe, folder: Path) -> Recipe:
    """For a trained model in the box, prompts of the kind that it knows, in the job's folder.

    Behind made-up ones it has nothing to say, and a draft nothing to guess.
    """
    source, length = held_out_text(recipe.model), recipe.evaluate.input_tokens
    if source is None or recipe.evaluate.dataset is not None:
        return recipe
    text = read_text(source, EVALUATION)
    starts = range(0, max(1, len(text) - length), length)
    lines = [json.dumps({"prompt": text[start : start + length]}) for start in starts]
    write_inside(folder / "prompts.jsonl", "\n".join(lines) + "\n")
    evaluate = recipe.evaluate.model_copy(update={"dataset": str(folder / "prompts.jsonl")})
    return recipe.model_copy(update={"evaluate": evaluate})


def _data(recipe: Recipe) -> tuple[list[int], list[Prompt]]:
    """The text and the prompts, as token ids of the recipe's model."""
    evaluate = recipe.evaluate
    tokenizer = find_tokenizer(recipe.model)
    if tokenizer is None:
        raise InputError(
            f"model {recipe.model!r} has no tokenizer.json: `optimize` scores texts; give a "
            "demo model or a Hugging Face folder"
        )
    given = held_out_text(recipe.model) if evaluate.text is None else Path(evaluate.text)
    text_ids = tokenizer.encode(read_text(given, EVALUATION))[: evaluate.text_tokens]
    if len(text_ids) < 2:
        raise InputError(f"{evaluate.text}: the text has no two tokens to score")
    return text_ids, _prompts(evaluate, tokenizer, text_ids)


def _prompts(evaluate: Evaluation, tokenizer: Tokenizer, text_ids: Sequence[int]) -> list[Prompt]:
    """Requests from the data set, or slices of the text; their greedy outputs are compared."""

    def prompt(token_ids: list[int], output_tokens: int | None = None) -> Prompt:
        length = output_tokens or evaluate.output_tokens
        return Prompt(token_ids, SamplingParams(max_new_tokens=length, ignore_eos=True))

    count = evaluate.agreement_prompts
    if evaluate.dataset is not None:
        entries = load_dataset(Path(evaluate.dataset))[:count]
        return [prompt(tokenizer.encode(text), output_tokens) for text, output_tokens in entries]
    length = min(evaluate.input_tokens, max(1, len(text_ids) // 2))
    starts = range(0, len(text_ids) - length, max(1, (len(text_ids) - length) // count))
    return [prompt(list(text_ids[start : start + length])) for start in starts[:count]]


def _measure(
    recipe: Recipe, variant: Variant | None, data: tuple[list[int], list[Prompt]], listener: Listener
) -> MeasuredVariant:
    name = BASELINE if variant is None else variant.name
    settings = recipe.settings(variant)
    if settings.backend == "auto":  # equal terms: native cannot run every variant
        settings = settings.model_copy(update={"backend": "torch"})
    listener.note(f"{name}: loading")
    start_s = time.monotonic()
    parts = open_torch_engine(recipe.model, settings, listener)
    load_s = time.monotonic() - start_s
    for line in parts.notes:
        listener.note(f"  {line}")
    start_s = time.monotonic()
    product_s = measure_products(parts, recipe.evaluate.concurrency)
    quality = measure_quality(parts, *data)
    quality_s = time.monotonic() - start_s
    listener.note(f"{name}: perplexity {text_perplexity(quality[0]):.3f}")
    stages_s = {"load_s": load_s, "quality_s": quality_s, "sweep_s": 0.0, "prepare_s": 0.0}
    return MeasuredVariant(name, settings, parts, *quality, stages_s, product_s=product_s)


def _sweep_in_rounds(recipe: Recipe, measured: Sequence[MeasuredVariant], folder: Path, listener: Listener) -> None:
    """Sweep all variants in turn, each round in the opposite order of the one before.

    A drift of the machine then meets every variant, and the baseline both first and last.
    """
    for number in range(1, recipe.evaluate.rounds + 1):
        for each in measured if number % 2 else reversed(measured):
            quantized = each.parts.quantized
            if quantized is not None and quantized.emulated:
                continue
            name = f"{each.name}-round-{number}"
            start_s = time.monotonic()
            run = _sweep(_scenario(recipe, each.settings), folder, name, listener)
            each.stages_s["sweep_s"] += time.monotonic() - start_s
            if run is not None:
                each.rounds.append(run)


def _sweep(scenario: Scenario, folder: Path, name: str, listener: Listener) -> Run | None:
    """Sweep the variant, and again if something disturbed the load generator.

    An invalid level has no ratio to the baseline, and a sweep is short compared with loading.
    """
    run = None
    heard = only(listener, "warn", "step", "progress")  # its notes repeat the variant's
    for attempt in range(1, _MOST_SWEEPS + 1):
        out = folder / (name if attempt == 1 else f"{name}-{attempt}")
        result = sweep_scenario(scenario, listener=heard, out=out)
        if result.interrupted:
            listener.warn(f"interrupted before variants were judged; finished levels are in {folder}")
            raise KeyboardInterrupt  # Ctrl-C ends the job, not this sweep alone
        run = result.pooled
        invalid = next((level for level in run.levels if not level.valid), None) if run else None
        if invalid is None:
            break
        listener.note(f"{name}: {invalid.name} is invalid: {invalid.invalid_reason}")
    return run


def _scenario(recipe: Recipe, settings: EngineSection) -> Scenario:
    evaluate = recipe.evaluate
    prompts: dict[str, Any] = {"dataset": evaluate.dataset}
    if evaluate.dataset is None:
        prompts = {"input_tokens": evaluate.input_tokens}
    return parse_scenario(
        {
            "model": recipe.model,
            "workload": {"output_tokens": evaluate.output_tokens, **prompts},
            "load": {"concurrency": list(evaluate.concurrency), "requests_per_user": evaluate.requests_per_user},
            "engine": settings.model_dump(),
        }
    )


def _keep_artefacts(recipe: Recipe, variant: Variant, each: MeasuredVariant, folder: Path, listener: Listener) -> None:
    start_s = time.monotonic()
    out = folder / f"{variant.name}-model" if variant.save else None
    each.layer_errors, saved_bytes = round_weights(recipe.model, each.settings, out, listener)
    if out is not None:
        each.saved = out
        listener.note(f"{variant.name}: {saved_bytes:,} bytes in {out}")
    each.stages_s["prepare_s"] = time.monotonic() - start_s


def _result(each: MeasuredVariant, base: MeasuredVariant, evaluate: Evaluation) -> VariantResult:
    """A variant's figures, and its speed beside the baseline's."""
    levels = [] if each.run is None else [line for line in each.run.levels if line.valid]
    best = max((line.throughput_tokens_per_s or 0.0 for line in levels), default=0.0)
    weight_bytes = sum(model.weight_bytes for model in each.parts.models)
    cache_bytes = sum(model.kv_cache_bytes for model in each.parts.models)
    token_bytes = cache_bytes / each.parts.config.cache_tokens
    room = sum(model.weight_bytes + model.kv_cache_bytes for model in base.parts.models)
    devices = each.parts.tensor_parallel * len(each.parts.executors)
    quantized = each.parts.quantized
    errors = each.layer_errors
    device_s = sum(each.stages_s.values()) * devices
    return VariantResult(
        name=each.name,
        engine=each.settings.model_dump(mode="json", exclude_unset=True),
        quality=VariantQuality(
            perplexity=text_perplexity(each.scores),
            scored_tokens=len(each.scores),
            agreement_frac=agreement_frac(each.outputs, base.outputs),
            logprob_shift=score_shift(each.scores, base.scores),
            mean_output_error=sum(errors.values()) / len(errors) if errors else None,
            output_error_of_layer=errors,
            accepted_frac=each.accepted_frac,
        ),
        memory=VariantMemory(
            weight_bytes=weight_bytes,
            kv_bytes_per_token=token_bytes,
            kv_tokens_in_baseline_memory=int((room - weight_bytes) / token_bytes),
        ),
        products_ms={str(rows): s_to_ms(time_s) for rows, time_s in each.product_s.items()},
        kernels=None if quantized is None else quantized.kernels,
        emulated=quantized is not None and quantized.emulated,
        levels=[
            {
                "concurrency": line.load.concurrency,
                "throughput_tokens_per_s": line.throughput_tokens_per_s,
                "latency_ms_per_token_mean": line.of("latency_per_token").mean,
                "latency_ms_per_token_p90": line.of("latency_per_token").p90,
            }
            for line in levels
        ],
        throughput_ratios=_ratios(base, each),
        usd_per_1m_output=usd_per_1m_tokens(evaluate.usd_per_hour, best),
        job={**each.stages_s, "devices": devices, "device_s": device_s},
        saved=None if each.saved is None else each.saved.name,
    )


def undecided_levels(each: VariantResult, results: Sequence[VariantResult]) -> tuple[str, ...]:
    """The levels whose ratio departs from 1 by no more than what should be equal does: the baseline
    from itself, and the products of equal weights, which the machine alone makes differ."""
    base, again = results[0], results[-1]
    if each.name in (base.name, again.name):
        return ()
    equal = 0.0
    if each.memory.weight_bytes == base.memory.weight_bytes:
        pairs = [(each.products_ms.get(rows), ms) for rows, ms in base.products_ms.items()]
        equal = max((abs(math.log(mine / ms)) for mine, ms in pairs if mine), default=0.0)

    def departure(result: VariantResult, level: str) -> float:
        ratio, *_ = result.throughput_ratios.get(level, (None,))
        return abs(math.log(ratio)) if ratio else 0.0

    return tuple(
        level for level in each.throughput_ratios if departure(each, level) <= max(equal, departure(again, level))
    )


def _ratios(base: MeasuredVariant, each: MeasuredVariant) -> dict[str, list[float | None]]:
    """Throughput against the baseline's in the same round, by level: [ratio, low, high].

    The interval (95 %, t over the logarithms) is that of the rounds; one round has none.
    """
    logs: dict[tuple[float, str], list[float]] = defaultdict(list)
    if each is not base:
        for first, second in zip(base.rounds, each.rounds, strict=False):
            reference = {line.name: line for line in first.levels}
            for line in second.levels:
                known = reference.get(line.name)
                if known is None or not (line.valid and known.valid):
                    continue
                if line.throughput_tokens_per_s and known.throughput_tokens_per_s:
                    ratio = line.throughput_tokens_per_s / known.throughput_tokens_per_s
                    logs[line.load.value, line.name].append(math.log(ratio))
    found = {name: spread(values) for (_, name), values in sorted(logs.items())}
    return {
        name: [None if value is None else math.exp(value) for value in (at.mean, at.low, at.high)]
        for name, at in found.items()
    }
