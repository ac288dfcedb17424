"""Work on the bundled engine's models: compile, convert, perplexity, and timing of operations."""

import itertools
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lmi_bench.analysis.model.collectives import CollectiveFit, fit_all_reduce
from lmi_bench.analysis.results.confidence import text_perplexity
from lmi_bench.core.durable import write_whole
from lmi_bench.core.errors import InputError, LmiBenchError, installed
from lmi_bench.core.host import host_facts, usable_cores
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.scenario_sections import EngineSection
from lmi_bench.core.units import MIB
from lmi_bench.engine.quantization import parse_scheme
from lmi_bench.engine.texts import EVALUATION, read_text
from lmi_bench.jobs.generate import run_closing
from lmi_bench.jobs.settings import bundled
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.models.folder import held_out_text, parse_rope_scaling, shape_of_folder
from lmi_bench.targets.bundled import model_folder, open_torch_engine
from lmi_bench.targets.loading import start_ranks_early
from lmi_bench.targets.prompts import find_tokenizer, weights_notes

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.measure import AttentionShape, AttentionTimes
    from lmi_bench.engine.torch_backend.static.forward import StepDifference


def compile_steps(settings: bundled.CompileSettings, listener: Listener = SILENT) -> "list[StepDifference]":
    """Compile, and compare each shape with the eager step; raises InputError for a model or setting
    that cannot be compiled."""
    stated = stated_settings(settings.steps) | {"compile": True}
    if settings.shapes is not None:
        stated["compile_shapes"] = settings.shapes
    engine = parse_scenario({"engine": stated}, source="compile").engine
    parts = open_torch_engine(settings.model, engine, listener, compile_into=settings.out)
    for line in parts.notes:
        listener.note(line)
    return run_closing(parts, parts.loaded.compare_prepared())


def convert(settings: bundled.ConvertSettings, listener: Listener = SILENT) -> str:
    """Convert, read the result again, and compare; a failed conversion leaves no folder.

    Returns the SHA-256 of the weights, the same in both folders.
    """
    with installed("the conversion"):
        from lmi_bench.engine.torch_backend.convert import convert as write
        from lmi_bench.engine.torch_backend.convert import weights_hash
    folder, out = settings.folder, settings.out
    existed = out.exists()
    try:
        title = f"converting {folder.name}"
        before = write(folder, out, progress=partial(listener.progress, title))
        listener.note("reading the new files ...")
        after = weights_hash(out)
        if after != before:
            raise LmiBenchError(f"{out} holds other weights ({after}) than {folder} ({before})")
    except BaseException:
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
        raise
    return after


AS_TRAINED: Final = "as it is"
_MOST_LENGTH: Final = 131_072


@dataclass(frozen=True, slots=True)
class Score:
    """A model's perplexity on a text, in windows of one length.

    perplexity      exp(-mean log-probability) of every token but each window's first
    far_perplexity  the same over the second half of each window
    """

    length: int
    tokens: int
    perplexity: float
    far_perplexity: float


@dataclass(frozen=True, slots=True)
class Perplexities:
    """Scores by RoPE scaling (None: as trained) and length; lengths that do not fit are absent."""

    settings: bundled.PerplexitySettings
    max_positions: int
    lengths: tuple[int, ...]
    scores: dict[str | None, dict[int, Score]]

    def to_json(self) -> dict[str, Any]:
        """As `perplexity --json` writes it."""
        settings = self.settings
        return {
            "model": settings.model,
            "max_positions": self.max_positions,
            "text": None if settings.text is None else str(settings.text),
            "dtype": settings.dtype,
            "quantize": settings.quantize,
            "lengths": [
                {"rope_scaling": scaling, **asdict(score)}
                for scaling, rows in self.scores.items()
                for score in rows.values()
            ],
        }


def perplexity(settings: bundled.PerplexitySettings, listener: Listener = SILENT) -> Perplexities:
    """Score the text at every length; raises InputError for settings that cannot be read."""
    wanted = _parse_lengths(settings.lengths)
    for scaling in settings.rope_scaling:
        parse_rope_scaling(scaling)
    model = settings.model
    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise InputError(f"model {model!r} has no tokenizer.json: give a demo model or a folder")
    text = read_text(settings.text or held_out_text(model), EVALUATION)
    token_ids = tokenizer.encode(text)[: settings.max_tokens]
    if len(token_ids) < wanted[0]:
        raise InputError(
            f"the text has {len(token_ids):,} tokens, fewer than one window of {wanted[0]:,}: "
            "give a longer --text or shorter --lengths"
        )
    scheme = parse_scheme(settings.quantize).value
    stated = {"backend": "torch", "dtype": settings.dtype, "quantize": scheme}
    engine = EngineSection.model_validate(stated)
    trained = shape_of_folder(model_folder(model)).max_positions
    scores = {
        scaling: _score_lengths(model, engine.model_copy(update={"rope_scaling": scaling}), token_ids, wanted, listener)
        for scaling in (None, *settings.rope_scaling)
    }
    for line in weights_notes(model):
        listener.note(line)
    return Perplexities(settings, trained, tuple(wanted), scores)


def _parse_lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 4 or lengths[-1] > _MOST_LENGTH:
        raise InputError(f"--lengths {text!r}: give whole numbers from 4 to {_MOST_LENGTH:,}, as in 128,256,512")
    return lengths


def _score_lengths(
    model: str, engine: EngineSection, token_ids: Sequence[int], wanted: Sequence[int], listener: Listener
) -> dict[int, Score]:
    parts = open_torch_engine(model, engine, listener)
    usable = [size for size in wanted if size <= min(parts.config.max_model_len, len(token_ids))]
    name = engine.rope_scaling or AS_TRAINED

    async def all_windows() -> dict[int, Score]:
        rows: dict[int, Score] = {}
        for length in usable:
            every: list[float] = []
            far: list[float] = []
            starts = range(0, len(token_ids) - length + 1, length)
            for count, start in enumerate(starts, start=1):
                window = token_ids[start : start + length]
                scores = await parts.loaded.score(window[:1], window[1:])
                every += scores
                far += scores[length // 2 - 1 :]
                listener.progress(f"{name}: windows of {length:,}", count, len(starts))
            rows[length] = Score(length, len(every), text_perplexity(every), text_perplexity(far))
        return rows

    return run_closing(parts, all_windows())


SCHEMA: Final = 1
SIZES_BYTES: Final = tuple(4**n * 1024 for n in range(8))  # 1 KiB to 16 MiB
TRANSPORTS: Final = ("shared_memory", "gloo")
ALL_TRANSPORTS: Final = (*TRANSPORTS, "nccl")
PROMPTS: Final = (256, 1024, 4096)
FLOAT32_BYTES: Final = 4
_MOST_SCORE_BYTES: Final = 4 * 1024 * MIB


@dataclass(frozen=True, slots=True)
class AllReduces:
    """Seconds of one all-reduce by transport, for each of SIZES_BYTES, and what fits them."""

    ranks: int
    rounds: int
    times_s: dict[str, list[float]]
    fits: dict[str, CollectiveFit]

    def to_json(self) -> dict[str, Any]:
        """As `profile collectives --out` writes it."""
        return {
            "schema": SCHEMA,
            "ranks": self.ranks,
            "rounds": self.rounds,
            "host": host_facts(),
            "all_reduce": {
                name: {
                    **asdict(fit),
                    "bytes_per_s": None if math.isinf(fit.bytes_per_s) else fit.bytes_per_s,
                    "points": [
                        {"bytes": size, "time_s": time_s}
                        for size, time_s in zip(SIZES_BYTES, self.times_s[name], strict=True)
                    ],
                }
                for name, fit in self.fits.items()
            },
        }


def time_collectives(settings: bundled.CollectiveSettings, listener: Listener = SILENT) -> AllReduces:
    """Measure each transport in turn; raises InputError before anything is started."""
    wanted = [name.replace("-", "_") for name in settings.transport] or list(TRANSPORTS)
    for name in wanted:
        if name not in ALL_TRANSPORTS:
            raise InputError(f"--transport {name}: use shared-memory, gloo, or nccl between GPUs")
    start_ranks_early()
    with installed("an all-reduce"):
        from lmi_bench.engine.torch_backend.executor import measure_all_reduces
    times_s = {}
    for name, groups in itertools.product(wanted, sorted({1, settings.groups})):
        label = name if groups == 1 else f"{name}, {groups} groups"
        listener.note(f"{label.replace('_', ' ')}, {settings.ranks} ranks ...")
        times_s[label] = measure_all_reduces(settings.ranks, name, SIZES_BYTES, rounds=settings.rounds, groups=groups)
    fits = {label: fit_all_reduce(SIZES_BYTES, times) for label, times in times_s.items()}
    found = AllReduces(settings.ranks, settings.rounds, times_s, fits)
    if settings.out is not None:
        write_whole(settings.out, found.to_json())
    return found


def time_attention(
    settings: bundled.AttentionSettings, listener: Listener = SILENT
) -> "list[tuple[AttentionShape, AttentionTimes]]":
    """Measure each prompt length in float32 on every core, with its score matrix and in tiles.

    Raises InputError before anything is measured.
    """
    with installed("the measurement"):
        from lmi_bench.engine.torch_backend.measure import AttentionShape, measure_attention
    heads, head_dim = settings.heads, settings.head_dim
    shapes = [AttentionShape(count, heads, head_dim) for count in settings.tokens or PROMPTS]
    for shape in shapes:
        score_bytes = 2 * shape.score_bytes(FLOAT32_BYTES)
        if score_bytes > _MOST_SCORE_BYTES:
            raise InputError(
                f"--tokens {shape.tokens}: two score matrices of {heads} heads take "
                f"{score_bytes / MIB:,.0f} MiB, more than {_MOST_SCORE_BYTES // MIB:,}: fewer "
                "tokens or --heads"
            )
    found = []
    for done, shape in enumerate(shapes):
        listener.progress(f"a prompt of {shape.tokens:,} tokens", done, len(shapes))
        times = measure_attention(shape, rounds=settings.rounds, threads=usable_cores())
        found.append((shape, times))
    return found
