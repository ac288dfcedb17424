"""Windows of a text scored by the bundled engine, for each way to stretch its positions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario_sections import EngineSection
from lmi_bench.engine.quantization import parse_scheme
from lmi_bench.engine.texts import EVALUATION, read_text
from lmi_bench.jobs.settings.perplexity import PerplexitySettings
from lmi_bench.models.folder import parse_rope_scaling, shape_of_folder
from lmi_bench.targets.bundled import model_folder, open_torch_engine
from lmi_bench.targets.parts import close_all
from lmi_bench.targets.prompts import find_tokenizer

AS_TRAINED: Final = "as it is"
_MOST_LENGTH: Final = 131_072


@dataclass(frozen=True, slots=True)
class Score:
    """How well a model knows a text that it reads in windows of one length.

    perplexity      exp(-mean log-probability) of every token but each window's first
    far_perplexity  the same over the second half of each window
    """

    length: int
    tokens: int
    perplexity: float
    far_perplexity: float


@dataclass(frozen=True, slots=True)
class Perplexities:
    """Scores by RoPE scaling (None: as trained) and length; a length that does not fit is absent.

    max_positions  the longest request that the model was trained for, in tokens
    """

    settings: PerplexitySettings
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


def perplexity(settings: PerplexitySettings, listener: Listener = SILENT) -> Perplexities:
    """Score the text at every length; raises InputError for settings that cannot be read."""
    wanted = _parse_lengths(settings.lengths)
    for scaling in settings.rope_scaling:
        parse_rope_scaling(scaling)
    model = settings.model
    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise InputError(f"model {model!r} has no tokenizer.json: give a demo model or a folder")
    token_ids = tokenizer.encode(read_text(settings.text, EVALUATION))[: settings.max_tokens]
    if len(token_ids) < wanted[0]:
        raise InputError(
            f"the text has {len(token_ids):,} tokens, fewer than one window of {wanted[0]:,}: "
            "give a longer --text or shorter --lengths"
        )
    engine = EngineSection.model_validate(
        {
            "backend": "torch",
            "dtype": settings.dtype,
            "quantize": parse_scheme(settings.quantize).value,
        }
    )
    trained = shape_of_folder(model_folder(model)).max_positions
    scores = {
        scaling: _score_lengths(
            model, engine.model_copy(update={"rope_scaling": scaling}), token_ids, wanted, listener
        )
        for scaling in (None, *settings.rope_scaling)
    }
    return Perplexities(settings, trained, tuple(wanted), scores)


def _parse_lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 4 or lengths[-1] > _MOST_LENGTH:
        raise InputError(
            f"--lengths {text!r}: give whole numbers from 4 to {_MOST_LENGTH:,}, as in 128,256,512"
        )
    return lengths


def _score_lengths(
    model: str,
    engine: EngineSection,
    token_ids: Sequence[int],
    wanted: Sequence[int],
    listener: Listener,
) -> dict[int, Score]:
    parts = open_torch_engine(model, engine, listener)
    assert parts.loaded is not None  # a torch engine scores
    score = parts.loaded.score
    usable = [
        length for length in wanted if length <= min(parts.config.max_model_len, len(token_ids))
    ]
    name = engine.rope_scaling or AS_TRAINED

    async def all_windows() -> dict[int, Score]:
        rows: dict[int, Score] = {}
        try:
            for length in usable:
                every: list[float] = []
                far: list[float] = []
                starts = range(0, len(token_ids) - length + 1, length)
                for count, start in enumerate(starts, start=1):
                    window = token_ids[start : start + length]
                    scores = await score(window[:1], window[1:])
                    every += scores
                    far += scores[length // 2 - 1 :]
                    listener.progress(f"{name}: windows of {length:,}", count, len(starts))
                rows[length] = Score(length, len(every), _exp(every), _exp(far))
        finally:
            await close_all(parts.executors)
        return rows

    return asyncio.run(all_windows())


def _exp(scores: Sequence[float]) -> float:
    return math.exp(-math.fsum(scores) / len(scores))
