"""The engine's greedy tokens on a GPU against transformers' on the CPU, for every family.

    TRITON_INTERPRET=0 PYTHONPATH=. python benchmarks/gpu_parity.py --out benchmarks/results

writes gpu_parity.md and --state, model by model: a run which is cut keeps what it has, and the
next one of the same code and seed goes on behind it. Models, modes and
the meaning of a cell are those of engine_parity.py, in float32; back ends are torch with eager
steps, torch with CUDA graphs, and Triton's kernels with CUDA graphs. Models run side by side in
processes of their own. The exit code is 1 if a token is wrong or a cell failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
Row = tuple[str, str, list[str], int, int]


def back_ends() -> dict[str, Callable[..., Any]]:
    from lmi_bench.engine.torch_backend.executor import TorchExecutor
    from lmi_bench.engine.torch_backend.static.build import StepSettings
    from lmi_bench.engine.triton_backend.step import TritonStep

    def load(folder: Any, options: Any, steps: Any, **beside: Any) -> Any:
        return TorchExecutor.load(folder, replace(options, device="cuda", steps=steps), **beside)

    graphs = StepSettings(captured=True, most_sequences=8, max_tokens=96)
    return {
        "torch, eager": partial(load, steps=StepSettings()),
        "torch, graphs": partial(load, steps=graphs),
        "triton, graphs": partial(load, steps=replace(graphs, kernels=TritonStep)),
    }


def rows_of(name: str, seed: int, count: int, modes: list[str]) -> list[Row]:
    """One row for each back end of one model."""
    import torch
    import transformers

    parity: Any = importlib.import_module("benchmarks.engine_parity")
    from lmi_bench.engine.triton_backend.step import unsupported
    from lmi_bench.models.folder import read_config
    from lmi_bench.models.hf_config import spec_from_hf_config

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    family, changes = models()[name]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        model = parity.tiny.TinyModel(Path(place) / "tiny", family, **changes)
        requests = parity.requests_of(random.Random(f"{seed} {name}"), count)
        references = [model.greedy(prompt, tokens) for prompt, tokens, _ in requests]
        for back_end, load in back_ends().items():
            spec = spec_from_hf_config("tiny", read_config(model.folder))
            if back_end.startswith("triton") and (reason := unsupported(spec, parity.BLOCK)):
                rows.append((name, back_end, [f"not run: {reason}"], 0, 0))
                continue
            table, cells = parity.Table(modes), []
            for mode in modes:
                try:
                    cells.append(table.cell(model, references, requests, load, mode))
                except Exception as exc:  # the other cells are worth having
                    reason = str(exc).partition("\n")[0][:120]
                    cells.append(f"failed: {type(exc).__name__}: {reason}")
                    table.wrong += 1
            without = back_end == "torch, graphs" and (spec.sinks or spec.latent_rank)
            label = "torch, eager: no graphs" if without else back_end
            rows.append((name, label, cells, table.compared, table.wrong))
    return rows


def models() -> dict[str, Any]:
    parity: Any = importlib.import_module("benchmarks.engine_parity")
    llamas = {f"Llama, {name}": ("Llama", changes) for name, changes in parity.LLAMAS.items()}
    llamas.pop("Llama, dynamic RoPE")
    every: dict[str, Any] = llamas | parity.MODELS
    return every


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--limit-s", type=float, default=600.0, help="begin nothing after this")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu_hour" / "gpu_parity.json")
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_parity needs a GPU that torch can use; there is none here")
    import transformers

    parity: Any = importlib.import_module("benchmarks.engine_parity")
    modes = list(parity.MODES)
    lost: list[str] = []
    start_s, names = time.monotonic(), [n for n in models() if asked.only in n]
    rows: list[Row] = []
    digest: Any = importlib.import_module("benchmarks.engine_gpu").code_digest
    key = [torch.cuda.get_device_name(), digest(), asked.requests]
    if asked.state.is_file() and (known := json.loads(asked.state.read_text("utf-8")))[0] == key:
        asked.seed, rows = known[1], [tuple(row) for row in known[2]]
    names = [name for name in names if name not in {row[0] for row in rows}]
    file = asked.out / "gpu_parity.md"
    for folder in (asked.out, asked.state.parent):
        folder.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(asked.jobs, mp_context=spawn)
    work = {pool.submit(rows_of, n, asked.seed, asked.requests, modes): n for n in names}
    every = [name for name in models() if asked.only in name]
    try:
        for done in as_completed(work, timeout=asked.limit_s):
            try:
                new = done.result()
            except Exception as exc:  # a process that died takes the others' work with it
                reason = f"failed: {type(exc).__name__}"
                print(f"| {work[done]} | {reason} |", flush=True)
                lost.append(work[done])
                continue
            for row in new:
                rows.append(row)
                print(f"| {row[0]} | {row[1]} | {' | '.join(row[2])} |", flush=True)
            asked.state.write_text(json.dumps([key, asked.seed, rows]), "utf-8")
            file.write_text(page(rows, every, modes, asked, start_s), "utf-8")
    except TimeoutError:
        print(f"cut after {asked.limit_s:.0f} s")
    for process in list(getattr(pool, "_processes", {}).values()):
        process.terminate()
    wrong = sum(row[4] for row in rows)
    compared = sum(row[3] for row in rows)
    print(f"{compared:,} tokens compared, {wrong} wrong; transformers {transformers.__version__}")
    return 1 if wrong or lost else 0


def page(rows: list[Row], names: list[str], modes: list[str], asked: Any, start_s: float) -> str:
    import torch
    import transformers

    compared, wrong = (sum(row[i] for row in rows) for i in (3, 4))
    done = {row[0] for row in rows}
    missing = [name for name in names if name not in done]
    return "\n".join(
        [
            "# The engine's tokens on a GPU against transformers'",
            "",
            f"{torch.cuda.get_device_name()}; torch {torch.__version__}, transformers "
            f"{transformers.__version__}. Tiny random models of every family, float32; "
            f"{asked.requests} requests a cell, seed {asked.seed}, "
            f"{time.monotonic() - start_s:.0f} s. Cells: compared / wrong tokens.",
            "",
            f"**{compared:,} tokens compared, {wrong} wrong.**"
            + (f" Not run: {', '.join(missing)}." if missing else ""),
            "",
            f"| model | back end | {' | '.join(modes)} |",
            f"|---|---|{'---:|' * len(modes)}",
            *(
                f"| {row[0]} | {row[1]} | {' | '.join(row[2] + [''] * (len(modes) - len(row[2])))} |"
                for row in sorted(rows, key=lambda row: names.index(row[0]))
            ),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
