"""Decisions on the published Llama 2 7B tables: limits on ms/token, candidates their cells.

    python benchmarks/published_decisions.py              nine limits
    python benchmarks/published_decisions.py --resample   and 20 draws of the published noise

A cell is an instance, a tensor-parallel degree and a concurrency; ml.p4d.24xlarge holds
floor(8 / TP) copies; prices are the catalog's. Published latencies are cut to milliseconds, so
a limit of 18 is kept by 18.9. The profile was fitted on these cells: what is judged here is the
decision, and the resamples say how much of it is noise.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.support.decisions import Decision, Option, decide  # noqa: E402
from lmi_bench.analysis.fit.calibrate import profile_of_fit  # noqa: E402
from lmi_bench.analysis.fit.fit import fit_cells  # noqa: E402
from lmi_bench.analysis.level.cells import predict_cell  # noqa: E402
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, TGI_2023  # noqa: E402
from lmi_bench.analysis.model.measured_level import MeasuredLevel  # noqa: E402
from lmi_bench.analysis.model.profiles import EngineProfile  # noqa: E402
from lmi_bench.analysis.model.setup import Setup  # noqa: E402
from lmi_bench.catalog.instances import find_instance  # noqa: E402
from lmi_bench.catalog.models import find_model  # noqa: E402
from lmi_bench.catalog.published import (  # noqa: E402
    JUMPSTART_REQUESTS_PER_USER,
    PublishedCell,
    jumpstart_concurrency,
)
from lmi_bench.core.load import Load  # noqa: E402

LIMITS_MS = (18, 20, 25, 35, 50, 65, 90, 110, 150)
CUT_MS = 1.0
# log-normal noise whose median absolute deviation is what the tables repeat within: 2 % and 5 %
THROUGHPUT_LOG_SD = 0.02 / 0.6745
LATENCY_LOG_SD = 0.05 / 0.6745
EIGHT_CELLS = (
    ("ml.g5.2xlarge", 1, 1), ("ml.g5.2xlarge", 1, 16), ("ml.g5.12xlarge", 4, 8),
    ("ml.g5.48xlarge", 8, 32), ("ml.p4d.24xlarge", 1, 1), ("ml.p4d.24xlarge", 1, 64),
    ("ml.p4d.24xlarge", 4, 16), ("ml.p4d.24xlarge", 8, 128),
)  # fmt: skip


def published_cells() -> list[PublishedCell]:
    """The tables' cells of one instance with both figures, each layout and load once."""
    cells: dict[tuple[str, int, int], PublishedCell] = {}
    for row in jumpstart_concurrency():
        if row.replicas == 1 and row.throughput_tokens_per_s and row.latency_s_per_token:
            cells.setdefault((row.instance_type, row.tensor_parallel, row.concurrency), row)
    return list(cells.values())


def options(profile: EngineProfile) -> list[Option]:
    """Every published cell as the profile predicts it and as it was measured."""
    found = []
    for row in published_cells():
        predicted = predict_cell(profile, cell_of(row))
        instance = find_instance(row.instance_type)
        copies = 1
        if row.instance_type == "ml.p4d.24xlarge":
            copies = instance.num_accelerators // row.tensor_parallel
        assert instance.price_usd_per_hour
        assert row.throughput_tokens_per_s
        assert row.latency_s_per_token
        usd_per_hour_copy = instance.price_usd_per_hour / copies
        found.append(
            Option(
                name=f"{row.instance_type} TP {row.tensor_parallel} at {row.concurrency}",
                predicted_usd=usd_per_hour_copy / predicted.throughput_tokens_per_s / 0.0036,
                predicted_latency=1e3 * predicted.latency_p90_s_per_token,
                true_usd=usd_per_hour_copy / row.throughput_tokens_per_s / 0.0036,
                true_latency=1e3 * row.latency_s_per_token,
                log_sd=profile.residual_log_sd,
            )
        )
    return found


def cell_of(row: PublishedCell) -> MeasuredLevel:
    """A published row as a cell: three requests a user, FP16."""
    return MeasuredLevel(
        Setup(
            find_model(row.model), find_instance(row.instance_type), row.tensor_parallel, "float16"
        ),
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        load=Load(row.concurrency),
        num_requests=JUMPSTART_REQUESTS_PER_USER * row.concurrency,
        throughput_tokens_per_s=row.throughput_tokens_per_s,
        latency_p90_s_per_token=row.latency_s_per_token,
        latency_rounded_down_s=CUT_MS / 1e3,
    )


def decisions(profile: EngineProfile) -> list[Decision]:
    """One decision a limit."""
    known = options(profile)
    return [decide(known, limit + CUT_MS) for limit in LIMITS_MS]


def resampled_profile(seed: int) -> EngineProfile:
    """The prior fitted to eight cells with the tables' own repeat noise on their figures."""
    chance = np.random.default_rng(seed)
    rows = {(r.instance_type, r.tensor_parallel, r.concurrency): r for r in published_cells()}
    cells = []
    for key in EIGHT_CELLS:
        cell = cell_of(rows[key])
        assert cell.throughput_tokens_per_s
        assert cell.latency_p90_s_per_token
        noise = np.exp(chance.normal(0.0, (THROUGHPUT_LOG_SD, LATENCY_LOG_SD)))
        cells.append(
            replace(
                cell,
                throughput_tokens_per_s=cell.throughput_tokens_per_s * float(noise[0]),
                latency_p90_s_per_token=cell.latency_p90_s_per_token * float(noise[1]),
            )
        )
    return profile_of_fit(
        fit_cells(EAGER_GPU_PRIOR, cells),
        fitted_on=f"eight cells, draw {seed}",
        fitted_date="2026-11-21",
    )


def print_decisions(profile: EngineProfile) -> None:
    print(f"{profile.provenance}")
    print(f"{'limit':>6}  {'kept':5} {'regret':>6}  choice (published ms/token)")
    made = decisions(profile)
    for limit, each in zip(LIMITS_MS, made, strict=True):
        chosen = each.chosen
        regret = "" if each.regret is None else f"{each.regret:.3f}"
        named = "none" if chosen is None else f"{chosen.name} ({chosen.true_latency:.0f})"
        print(f"{limit:6d}  {'yes' if each.kept else 'no':5} {regret:>6}  {named}")
    regrets = [each.regret for each in made if each.regret is not None]
    print(
        f"kept {sum(each.kept for each in made)} of {len(made)}; regret median "
        f"{np.median(regrets):.3f}, worst {max(regrets):.3f}"
    )


def print_resamples(count: int) -> None:
    chosen: list[Counter[str]] = [Counter() for _ in LIMITS_MS]
    tied = [0] * len(LIMITS_MS)
    kept = 0
    made = []
    for seed in range(count):
        made.append(decisions(resampled_profile(seed)))
    for index in range(len(LIMITS_MS)):
        for run in made:
            name = run[index].chosen.name if run[index].chosen else "none"
            chosen[index][name] += 1
            kept += run[index].kept
        usual = chosen[index].most_common(1)[0][0]
        tied[index] = sum(
            (run[index].chosen.name if run[index].chosen else "none") == usual
            or usual in run[index].tied
            for run in made
        )
    print(f"\n{count} draws of the published noise on eight cells, fitted anew each time")
    for limit, counter, agreed in zip(LIMITS_MS, chosen, tied, strict=True):
        name, number = counter.most_common(1)[0]
        print(f"{limit:6d}  {name}: chosen in {number} of {count}, or declared tied in {agreed}")
    regrets = [d.regret for run in made for d in run if d.regret is not None]
    print(
        f"kept {kept} of {count * len(LIMITS_MS)}; regret median {np.median(regrets):.3f}, "
        f"90th percentile {np.quantile(regrets, 0.9):.3f}, worst {max(regrets):.3f}"
    )
    assert math.isfinite(sum(regrets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resample", action="store_true", help="20 draws of the noise too")
    options_given = parser.parse_args()
    print_decisions(TGI_2023)
    if options_given.resample:
        print_resamples(20)


if __name__ == "__main__":
    main()
