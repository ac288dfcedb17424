"""Windows of a text scored by the bundled engine, for each way to stretch its positions."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmi_bench.cli.console import note, print_table, progress, terminal
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario_sections import EngineSection
from lmi_bench.engine.quantization import parse_scheme
from lmi_bench.engine.texts import EVALUATION, read_text
from lmi_bench.models.folder import shape_of_folder
from lmi_bench.models.rope_scaling import parse_rope_scaling
from lmi_bench.report.formats import MISSING, number
from lmi_bench.targets.bundled import model_folder, open_torch_engine
from lmi_bench.targets.parts import close_all
from lmi_bench.targets.tokenizers import find_tokenizer

_AS_TRAINED: Final = "as it is"
_MOST_LENGTH: Final = 131_072


@dataclass(frozen=True, slots=True)
class _Scored:
    """perplexity       exp(-mean log-probability) of every token behind a window's first
    far_perplexity      the same over the second half of each window
    """

    length: int
    tokens: int
    perplexity: float
    far_perplexity: float


def run_perplexity(
    model: str,
    lengths: str,
    scalings: Sequence[str],
    *,
    text: Path | None,
    max_tokens: int,
    dtype: str,
    quantize: str,
    json_file: Path | None,
) -> None:
    """Score and print, longest window last; what a variant cannot read is left out."""
    wanted = _parse_lengths(lengths)
    for scaling in scalings:
        parse_rope_scaling(scaling)
    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise InputError(f"model {model!r} has no tokenizer.json: give a demo model or a folder")
    token_ids = tokenizer.encode(read_text(text, EVALUATION))[:max_tokens]
    if len(token_ids) < wanted[0]:
        raise InputError(
            f"the text has {len(token_ids):,} tokens, fewer than one window of {wanted[0]:,}: "
            "give a longer --text or shorter --lengths"
        )
    settings = EngineSection.model_validate(
        {"backend": "torch", "dtype": dtype, "quantize": parse_scheme(quantize).value}
    )
    trained = shape_of_folder(model_folder(model)).max_positions
    found: dict[str, dict[int, _Scored]] = {}
    for name in (_AS_TRAINED, *scalings):
        chosen = settings.model_copy(update={"rope_scaling": None if name == _AS_TRAINED else name})
        found[name] = _score_lengths(model, chosen, name, token_ids, wanted)
    _print(model, trained, wanted, found)
    if json_file is not None:
        content = {
            "model": model,
            "max_positions": trained,
            "text": None if text is None else str(text),
            "dtype": dtype,
            "quantize": quantize,
            "lengths": [
                {"rope_scaling": None if name == _AS_TRAINED else name, **_plain(scored)}
                for name, rows in found.items()
                for scored in rows.values()
            ],
        }
        write_text(json_file, json.dumps(content, indent=2) + "\n")


def _plain(scored: _Scored) -> dict[str, Any]:
    return {name: getattr(scored, name) for name in scored.__slots__}


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
    model: str, settings: EngineSection, name: str, token_ids: Sequence[int], wanted: Sequence[int]
) -> dict[int, _Scored]:
    with terminal() as listener:
        parts = open_torch_engine(model, settings, listener)
    score = parts.score
    assert score is not None  # a torch engine scores
    usable = [
        length for length in wanted if length <= min(parts.config.max_model_len, len(token_ids))
    ]

    async def all_windows() -> dict[int, _Scored]:
        rows: dict[int, _Scored] = {}
        try:
            with progress() as report:
                for length in usable:
                    every: list[float] = []
                    far: list[float] = []
                    starts = range(0, len(token_ids) - length + 1, length)
                    for count, start in enumerate(starts, start=1):
                        window = token_ids[start : start + length]
                        scores = await score(window[:1], window[1:])
                        every += scores
                        far += scores[length // 2 - 1 :]
                        report(f"{name}: windows of {length:,}", count, len(starts))
                    rows[length] = _Scored(length, len(every), _exp(every), _exp(far))
        finally:
            await close_all(parts.executors)
        return rows

    return asyncio.run(all_windows())


def _exp(scores: Sequence[float]) -> float:
    return math.exp(-math.fsum(scores) / len(scores))


def _print(
    model: str, trained: int, wanted: Sequence[int], found: dict[str, dict[int, _Scored]]
) -> None:
    rows = []
    for length in wanted:
        cells = {"tokens at once": f"{length:,}"}
        for name, scored in found.items():
            at = scored.get(length)
            cells[f"{name}: all"] = MISSING if at is None else number(at.perplexity, 4)
            cells[f"{name}: 2nd half"] = MISSING if at is None else number(at.far_perplexity, 4)
        rows.append(cells)
    print_table(f"Perplexity of {model}, which knows {trained:,} positions", rows)
    if any(length not in scored for scored in found.values() for length in wanted):
        note(
            f"{MISSING}: longer than the text, or than the positions that the model knows; "
            "--rope-scaling stretches them"
        )
