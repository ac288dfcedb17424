"""Fits the profiles that ship to published tables and prints their constants and errors.

    python benchmarks/fit_profiles.py            errors of the shipped profiles on their tables
    python benchmarks/fit_profiles.py --refit    fit again and write catalog/data/profiles/*.json

TGI (2023) is fitted to the JumpStart tables, which ship, the bundled engine to the levels of
engine_gpu.py. The others are fitted to tables that may
not ship: two in the folder LMI_BENCH_TABLES, and InferenceX's beside it. Without them they are left
as they are.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmi_bench.analysis.fit.discrepancy import observations_of
from lmi_bench.analysis.fit.fit import fit_cells
from lmi_bench.analysis.fit.from_run import profile_of_fit
from lmi_bench.analysis.fit.measured_tables import TableRow, read_table
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, GRAPH_GPU_PRIOR, SGLANG_PRIOR, TRT_LLM_PRIOR
from lmi_bench.analysis.model.measured_level import MeasuredLevel, marks_of
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, V1, EngineProfile, profile_from_json, profile_to_json

DATA = Path(__file__).parents[1] / "lmi_bench" / "catalog" / "data"
STATED = ("architectures", "dtypes", "compute_capability")  # in the file, not fitted
TABLES = os.environ.get("LMI_BENCH_TABLES", "")


@dataclass(frozen=True)
class Plan:
    """One profile: its file, its prior and the rows it is fitted to.

    devices  of InferenceX's rows, of which the last of each level in the file counts
    """

    file: str
    prior: EngineProfile
    tables: tuple[Path, ...]
    engines: tuple[str, ...]
    fitted_on: str
    devices: tuple[str, ...] = ()

    def rows(self) -> list[TableRow]:
        rows = [row for table in self.tables for row in read_table(table)]
        mine = [row for row in rows if row.engine in self.engines and self._is_fitted(row)]
        if not self.devices:
            return mine
        return list({level_of(row): row for row in mine}.values())  # nightly runs repeat

    def _is_fitted(self, row: TableRow) -> bool:
        """Without speculation, whose acceptance no table states, and of one pool."""
        cell = row.cell
        return (
            cell is not None
            and row.fits
            and cell.setup.speculation is None
            and cell.prefill is None
            and (not self.devices or cell.setup.instance.accelerator.name in self.devices)
        )


def level_of(row: TableRow) -> tuple[object, ...]:
    cell = row.cell
    assert cell is not None
    return cell.setup, cell.input_tokens, cell.output_tokens, cell.concurrency


def plans() -> list[Plan]:
    jumpstart = Plan(
        "tgi_2023.json",
        EAGER_GPU_PRIOR,
        (DATA / "published" / "jumpstart_concurrency.csv",),
        ("",),
        "95 cells of the JumpStart tables: Llama 2 7B, FP16, A10G and A100 40 GB",
    )
    bundled = Plan(
        "bundled_h200.json",
        # the settings of engine_gpu.py's levels: those of the engine, for 256 sequences
        replace(
            GRAPH_GPU_PRIOR,
            name="bundled engine",
            version="with Triton",
            vendors=("nvidia",),
            max_batch_size=256,
            max_prefill_tokens=4096,
            chunked_prefill=False,
            block_size=64,
        ),
        (Path(__file__).parent / "results" / "engine_gpu_levels.csv",),
        ("lmi-bench triton",),
        "3 levels of one model, Qwen3 8B BF16, on one H200 at TP 1 (benchmarks/results/engine_gpu_levels.csv)",
    )
    if not TABLES:
        return [jumpstart, bundled]
    closed, open_ = (Path(TABLES) / f"h100_vllm_{kind}_loop.csv" for kind in ("closed", "open"))
    inferencex = (Path(TABLES).parent / "inferencex_deepseek_r1.csv",)
    return [
        jumpstart,
        bundled,
        *(
            Plan(
                file,
                replace(prior, version="2026", vendors=(vendor,)),
                inferencex,
                (engine,),
                f"InferenceX's rows of DeepSeek-R1 on {' and '.join(devices)}",
                devices,
            )
            for file, prior, engine, devices, vendor in (
                ("sglang_b200.json", SGLANG_PRIOR, "sglang", ("B200",), "nvidia"),
                ("sglang_mi300x.json", SGLANG_PRIOR, "sglang", ("MI300X",), "amd"),
                ("sglang_mi355x.json", SGLANG_PRIOR, "sglang", ("MI355X",), "amd"),
                ("trt_llm_h200.json", TRT_LLM_PRIOR, "trt", ("H200",), "nvidia"),
                ("trt_llm_b200.json", TRT_LLM_PRIOR, "trt", ("B200",), "nvidia"),
            )
        ),
        Plan(
            "vllm.json",
            replace(GRAPH_GPU_PRIOR, version="0.12 to 0.19", defaults=V1),
            (closed, open_),
            ("vllm 0.12.0", "vllm"),
            "149 cells on H100: a closed loop of Qwen3 32B BF16 and Llama 3.1 70B FP8, TP 2 to 8, "
            "and an open loop of Llama 3.1 8B and Mixtral 8x7B FP16",
        ),
        Plan(
            "vllm_0_12.json",
            replace(GRAPH_GPU_PRIOR, version="0.12", defaults=V1),
            (closed,),
            ("vllm 0.12.0", "vllm"),
            "135 cells of a closed loop on H100: Qwen3 32B BF16, Llama 3.1 70B FP8, TP 2 to 8",
        ),
        Plan(
            "vllm_0_19.json",
            replace(GRAPH_GPU_PRIOR, version="0.19", defaults=V1),
            (open_,),
            ("vllm",),
            "14 cells of an open loop on H100: Llama 3.1 8B at TP 1, Mixtral 8x7B at TP 2, FP16",
        ),
    ]


def fit(plan: Plan) -> EngineProfile:
    cells = [row.cell for row in plan.rows() if row.cell is not None]
    fitted = fit_cells(plan.prior, cells)
    profile = profile_of_fit(fitted, fitted_on=plan.fitted_on, fitted_date=time.strftime("%Y-%m-%d"))
    print_constants(profile)
    print_errors(cells, fitted.residuals)
    return profile


def print_constants(profile: EngineProfile) -> None:
    print(f"{profile.provenance}; reserve {profile.reserve_bytes / 1e9:.1f} GB, ", end="")
    print(f"{profile.max_prefill_tokens} tokens a step, {profile.max_batch_size} sequences")
    for name in PARAMETER_NAMES:
        value, sd = getattr(profile.parameters, name), profile.log_sd.get(name, 0.0)
        print(f"  {name:26s} {value:.4g}  (log sd {sd:.3f})")
    for name, value in profile.host_factors.items():
        print(f"  host of {name:18s} {value:.4g}")
    for note in profile.notes:
        print(f"  {note}")


def print_errors(cells: Sequence[MeasuredLevel], residuals: np.ndarray) -> None:
    items = observations_of(cells)
    for metric in dict.fromkeys(item.metric for item in items):
        errors = [abs(np.expm1(-error)) for item, error in zip(items, residuals, strict=True) if item.metric == metric]
        middle, high = np.quantile(errors, [0.5, 0.9])
        print(f"  {metric:26s} median {middle:.1%}, p90 {high:.1%} of {len(errors)}")


def rounded(profile: EngineProfile) -> EngineProfile:
    """The profile with as many digits as it means."""
    values = {n: float(f"{getattr(profile.parameters, n):.5g}") for n in PARAMETER_NAMES}
    return replace(
        profile,
        parameters=replace(profile.parameters, **values),
        host_factors={name: round(value, 4) for name, value in profile.host_factors.items()},
        log_sd={name: round(value, 4) for name, value in profile.log_sd.items()},
        log_correlation=tuple(tuple(round(value, 3) for value in row) for row in profile.log_correlation),
        reserve_bytes=round(profile.reserve_bytes, -6),
        residual_log_sd=round(profile.residual_log_sd, 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="of the file with this in its name")
    parser.add_argument("--refit", action="store_true", help="write the profiles")
    given = parser.parse_args()
    refit = given.refit
    for plan in plans():
        if given.only not in plan.file:
            continue
        profile = fit(plan)
        if refit:
            cells = [row.cell for row in plan.rows() if row.cell is not None]
            marked = replace(
                rounded(profile),
                fitted_cells=tuple(sorted(marks_of(cells))),
                # cells of one type of device near its limit do not tell the constant of all types
                reserve_bytes=plan.prior.reserve_bytes,
            )
            path = DATA / "profiles" / plan.file
            kept: dict[str, Any] = {}
            if path.exists():
                before = profile_from_json(path.read_text(encoding="utf-8"))
                kept = {name: getattr(before, name) for name in STATED}
            path.write_text(profile_to_json(replace(marked, **kept)), encoding="utf-8")


if __name__ == "__main__":
    main()
