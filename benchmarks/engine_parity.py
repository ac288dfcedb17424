"""The engine's greedy tokens against transformers', for every family, on tiny random models.

    PYTHONPATH=. python benchmarks/engine_parity.py --out benchmarks/results/engine_parity.md

Every cell has the compared and the wrong tokens of the same requests. A comparison ends where
transformers' two best logits lie within 1e-4: float32 sums in another order may choose either.
Dynamic RoPE is left out: beyond the trained length its tokens depend on the chunks.
The seed is new in every run unless it is given. The exit code is 1 if a token is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from lmi_bench.core.errors import LmiBenchError
from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.native_backend.executor import NativeExecutor
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter, NgramDrafter
from lmi_bench.engine.torch_backend.executor import ParallelExecutor, TorchExecutor

# the tests are not typed
parity: Any = importlib.import_module("tests.engine.torch_backend.parity")
tiny: Any = importlib.import_module("tests.engine.torch_backend.tiny_models")
LLAMAS: Any = importlib.import_module("tests.engine.torch_backend.test_greedy_parity").MODELS
MODELS: Any = importlib.import_module("tests.engine.torch_backend.test_families").MODELS

BLOCK = 16
CACHE = {"num_blocks": 60, "max_model_len": 96}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"max_rolling_batch_size": 1},
    "batched": {},
    "preempted": {"num_blocks": 8},
    "chunked": {"chunked_prefill": True, "max_rolling_batch_prefill_tokens": 7},
    "prefix": {"prefix_caching": True, "max_rolling_batch_size": 3},
    "n-gram": {"drafter": 3},
    "draft": {"draft": 3},  # of the model itself: all but near ties are accepted
}
BACK_ENDS: dict[str, Callable[..., Any]] = {"torch": TorchExecutor.load, "native": NativeExecutor.load}
Request = tuple[list[int], int, float]


def requests_of(chance: random.Random, count: int) -> list[Request]:
    """Prompts of 25 to 50 tokens, of which the first 24 are common to all, and 10 to 40 more."""
    common = [chance.randrange(3, tiny.VOCAB_SIZE) for _ in range(24)]
    return [
        (
            common + [chance.randrange(3, tiny.VOCAB_SIZE) for _ in range(chance.randint(1, 26))],
            chance.randint(10, 40),
            0.0,
        )
        for _ in range(count)
    ]


def counted(references: list[Any], outputs: list[list[int]]) -> tuple[int, int]:
    """Compared and wrong tokens; behind a wrong token a request is not compared further."""
    compared = wrong = 0
    for reference, tokens in zip(references, outputs, strict=True):
        wrong += abs(len(tokens) - len(reference.token_ids))
        for mine, theirs, gap in zip(tokens, reference.token_ids, reference.gaps, strict=False):
            if gap < parity.NEAR_TIE:
                break
            compared += 1
            if mine != theirs:
                wrong += 1
                break
    return compared, wrong


def with_draft(load: Callable[..., Any], folder: Path, options: Any) -> Any:
    """The model with itself as its draft."""
    target = load(folder, options)
    return DraftingExecutor(target, load(folder, options, beside=target))


class Table:
    """Rows as they are done, and what the modes did: a mode that does nothing proves nothing."""

    def __init__(self, modes: list[str]) -> None:
        self.modes = modes
        self.rows: list[str] = []
        self.compared = self.wrong = 0
        self.counts = {"preemptions": 0, "prefix_hit_tokens": 0, "accepted_tokens": 0}
        self.drafted = 0

    def add(self, name: str, back_end: str, cells: list[str]) -> None:
        self.rows.append(f"| {name} | {back_end} | {' | '.join(cells)} |")
        print(self.rows[-1], flush=True)

    def cell(
        self, model: Any, references: list[Any], requests: list[Request], load: Callable[..., Any], mode: str
    ) -> str:
        settings = CACHE | MODES.get(mode, {})
        if drafted := settings.pop("drafter", None):
            settings["drafter"] = NgramDrafter(drafted, shortest=1)
        if drafted := settings.pop("draft", None):
            settings["drafter"] = ExecutorDrafter(drafted)
            load = partial(with_draft, load)
        running = parity.generate(model.folder, requests, block_size=BLOCK, load=load, **settings)
        outputs, stats = asyncio.run(running)
        compared, wrong = counted(references, outputs)
        self.compared += compared
        self.wrong += wrong
        for name in self.counts:
            self.counts[name] += getattr(stats, name)
        self.drafted += stats.drafted_tokens
        return f"{compared:,} / {wrong}"

    def text(self, seed: int, count: int, took_s: float) -> str:
        did = self.counts
        return "\n".join(
            [
                "# The engine's tokens against transformers'",
                "",
                f"Tiny random models of every family, float32, transformers "
                f"{transformers.__version__}, torch {torch.__version__}; {count} requests a cell, "
                f"seed {seed}, {took_s:.0f} s. Cells: compared / wrong tokens.",
                "",
                f"**{self.compared:,} tokens compared, {self.wrong} wrong**, with "
                f"{did['preemptions']:,} preemptions, {did['prefix_hit_tokens']:,} tokens from the "
                f"prefix cache, {self.drafted:,} drafted tokens of which "
                f"{did['accepted_tokens']:,} were accepted.",
                "",
                f"| model | back end | {' | '.join(self.modes)} |",
                f"|---|---|{'---:|' * len(self.modes)}",
                *self.rows,
                "",
            ]
        )


def measure(table: Table, name: str, model: Any, requests: list[Request], ranks: int) -> None:
    references = [model.greedy(prompt, tokens) for prompt, tokens, _ in requests]
    for back_end, load in BACK_ENDS.items():
        modes = list(MODES)
        try:
            cells = [table.cell(model, references, requests, load, mode) for mode in modes]
        except NativeUnavailableError as exc:
            cells = [f"not run: {exc}"] + [""] * (len(modes) - 1)
        if ranks > 1:
            cells.append("")
        if ranks > 1 and back_end == "torch":
            split = partial(ParallelExecutor.load, tensor_parallel=ranks)
            try:
                cells[-1] = table.cell(model, references, requests, split, "ranks")
            except LmiBenchError as exc:
                cells[-1] = f"not run: {exc}"
        table.add(name, back_end, cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--tp", type=int, default=2, help="ranks of the last column; 1: without")
    parser.add_argument("--out", type=Path, help="Markdown file; the default is to print")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    llamas = {f"Llama, {name}": ("Llama", changes) for name, changes in LLAMAS.items()}
    llamas.pop("Llama, dynamic RoPE")
    models = {name: case for name, case in (llamas | MODELS).items() if asked.only in name}
    chance, start_s = random.Random(asked.seed), time.monotonic()
    table = Table([*MODES, *([f"TP {asked.tp}"] if asked.tp > 1 else [])])
    for name, (family, changes) in models.items():
        with tempfile.TemporaryDirectory() as place:
            model = tiny.TinyModel(Path(place) / "tiny", family, **changes)
            measure(table, name, model, requests_of(chance, asked.requests), asked.tp)
    text = table.text(asked.seed, asked.requests, time.monotonic() - start_s)
    print(text) if asked.out is None else asked.out.write_text(text, "utf-8")
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
