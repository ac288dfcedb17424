"""Fits the TGI-2023 profile on the JumpStart tables and prints its constants and its errors.

    python benchmarks/fit_tgi_2023.py            constants as shipped, errors by table and slice
    python benchmarks/fit_tgi_2023.py --refit    fit again and print the constants to ship

Fitted on Llama 2 7B with one copy (79 cells: throughput and 90th percentile of latency). The cells
with 2 and 3 instances, and the other models' extremes, are held out. The reserve is chosen on a
grid, since the number of sequences that fit changes in steps.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from lmi_bench.analysis.builtin_profiles import EAGER_GPU_PRIOR, TGI_2023
from lmi_bench.analysis.calibrate import Cell, calibrate_profile, log_errors, predict_cell
from lmi_bench.analysis.profiles import PARAMETER_NAMES, EngineProfile
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import (
    JUMPSTART_REQUESTS_PER_USER,
    PublishedCell,
    jumpstart_concurrency,
    jumpstart_extremes,
)

RESERVES_BYTES = (1.2e9, 1.4e9, 1.6e9, 1.8e9, 2.0e9, 2.2e9, 2.4e9)
CUT_S = 1e-3  # latencies are published as whole milliseconds


def cell_of(published: PublishedCell) -> Cell:
    """A published row as a cell: three requests a user, FP16."""
    return Cell(
        shape=find_model(published.model),
        instance=find_instance(published.instance_type),
        tensor_parallel=published.tensor_parallel,
        dtype="float16",
        input_tokens=published.input_tokens,
        output_tokens=published.output_tokens,
        concurrency=published.concurrency,
        num_requests=JUMPSTART_REQUESTS_PER_USER * published.concurrency,
        throughput_tokens_per_s=published.throughput_tokens_per_s,
        latency_p90_s_per_token=published.latency_s_per_token,
        replicas=published.replicas,
        latency_rounded_down_s=CUT_S,
    )


def refit() -> EngineProfile:
    cells = [cell_of(row) for row in jumpstart_concurrency() if row.replicas == 1]
    best: tuple[float, EngineProfile] | None = None
    for reserve_bytes in RESERVES_BYTES:
        profile = calibrate_profile(
            replace(EAGER_GPU_PRIOR, reserve_bytes=reserve_bytes),
            cells,
            fitted_on="79 cells of the JumpStart tables: Llama 2 7B, FP16, A10G and A100 40 GB",
            fitted_date=time.strftime("%Y-%m-%d"),
        )
        errors = np.array([e for cell in cells for e in log_errors(profile, cell)])
        cost = float(np.mean(np.sqrt(1 + (errors / 0.05) ** 2) - 1))
        print(f"reserve {reserve_bytes / 1e9:.1f} GB: robust cost {cost:.4f}")
        if best is None or cost < best[0]:
            best = (cost, profile)
    assert best is not None
    return best[1]


def print_constants(profile: EngineProfile) -> None:
    print(f"{profile.provenance}; reserve {profile.reserve_bytes / 1e9:.1f} GB, ", end="")
    print(f"residual {profile.residual_log_sd:.3f}")
    for name in PARAMETER_NAMES:
        value, sd = getattr(profile.parameters, name), profile.log_sd.get(name, 0.0)
        print(f"  {name:26s} {value:.4g}  (log sd {sd:.3f})")
    for note in profile.notes:
        print(f"  {note}")


def print_errors(profile: EngineProfile, rows: Iterable[PublishedCell]) -> None:
    throughput: list[tuple[PublishedCell, float]] = []
    latency: list[tuple[PublishedCell, float]] = []
    for row in rows:
        predicted = predict_cell(profile, cell_of(row))
        if row.throughput_tokens_per_s is not None:
            error = predicted.throughput_tokens_per_s / row.throughput_tokens_per_s - 1
            throughput.append((row, error))
        if row.latency_s_per_token is not None:
            measured = row.latency_s_per_token + CUT_S / 2
            latency.append((row, predicted.latency_p90_s_per_token / measured - 1))
    slices: dict[str, Callable[[PublishedCell], bool]] = {
        "Llama 2 7B, one copy (fitted)": lambda r: (
            "Llama" in r.model and r.replicas == 1 and r in jumpstart_concurrency()
        ),
        "  instance_comparison": lambda r: r.table == "instance_comparison",
        "  tensor_parallel_degree": lambda r: r.table == "tensor_parallel_degree",
        "  A10G": lambda r: "Llama" in r.model and "g5" in r.instance_type and r.replicas == 1,
        "  TP > 1": lambda r: "Llama" in r.model and r.tensor_parallel > 1,
        "  concurrency >= 64": lambda r: "Llama" in r.model and r.concurrency >= 64,
        "2 and 3 instances (held out)": lambda r: r.replicas > 1,
        "other models (held out)": lambda r: "Llama" not in r.model,
    }
    print(f"{'':34s}{'throughput':>22s}{'ms/token (p90)':>22s}")
    print(f"{'slice':34s}{'n  median     p90':>22s}{'n  median     p90':>22s}")
    for label, belongs in slices.items():
        line = f"{label:34s}"
        for pairs in (throughput, latency):
            errors = [abs(error) for row, error in pairs if belongs(row)]
            if errors:
                middle, high = np.quantile(errors, [0.5, 0.9])
                line += f"{len(errors):6d} {middle:6.1%} {high:7.1%}"
            else:
                line += " " * 22
        print(line)


def print_correlation(profile: EngineProfile) -> None:
    print("log_correlation=(")
    for row in profile.log_correlation:
        print("    (" + ", ".join(f"{value:.2f}" for value in row) + "),")
    print(")")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refit", action="store_true", help="fit again instead of judging")
    profile = refit() if parser.parse_args().refit else TGI_2023
    print_constants(profile)
    if profile is not TGI_2023:
        print_correlation(profile)
    print_errors(profile, (*jumpstart_concurrency(), *jumpstart_extremes()))
    assert math.isfinite(profile.residual_log_sd)


if __name__ == "__main__":
    main()
