"""Which cells to measure: those that make the predictions of all others narrowest.

Greedy: each next cell is the one whose measurement lowers the mean variance of the wanted figures
most, with parameters and shared model error taken together. Only what is predicted counts, never
what was measured, so a plan can be made before anything is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fit.discrepancy import Observation, observe
from lmi_bench.analysis.fit.fit import Fit, derivatives
from lmi_bench.analysis.level.cells import (
    MeasuredLevel,
    Metric,
    growth_with_step_times,
    predict_cell,
)

_JITTER = 1e-10


def choose_cells(
    fit: Fit,
    candidates: Sequence[MeasuredLevel],
    wanted: Sequence[MeasuredLevel],
    count: int,
    metrics: Sequence[Metric],
) -> list[int]:
    """Indices of the candidates to measure, the most useful first.

    fit      what is known already; its measured cells count as measured
    wanted   cells that are to be predicted
    """
    derived: dict[int, NDArray[np.float64]] = {}
    foreseen: dict[int, float] = {}
    grown: dict[int, dict[Metric, float] | None] = {}

    def rows(cells: Sequence[MeasuredLevel]) -> tuple[list[Observation], NDArray[np.float64]]:
        for cell in cells:
            if id(cell) not in derived:
                derived[id(cell)] = derivatives(fit.profile, cell, fit.names, metrics)
                predicted = predict_cell(fit.profile, cell, smooth=True)
                foreseen[id(cell)] = predicted.throughput_tokens_per_s
                grown[id(cell)] = (
                    None if cell.rate_per_s is None else growth_with_step_times(fit.profile, cell)
                )
        items = [
            observe(cell, metric, foreseen[id(cell)], grown[id(cell)])
            for cell in cells
            for metric in metrics
        ]
        return items, np.concatenate([derived[id(cell)] for cell in cells])

    items, jacobian = rows(candidates)
    targets, target_jacobian = rows(wanted)
    shared = fit.error_left(targets, items)
    return _greedy(
        jacobian @ fit.covariance @ jacobian.T + fit.error_left(items, items),
        target_jacobian @ fit.covariance @ jacobian.T + shared,
        fit.scales.of(items) ** 2 * np.array([item.noise_sd**2 for item in items]),
        len(metrics),
        min(count, len(candidates)),
    )


def _greedy(
    among: NDArray[np.float64],
    across: NDArray[np.float64],
    noise: NDArray[np.float64],
    size: int,
    count: int,
) -> list[int]:
    """Blocks of figures, one after the other that lowers the variance of the wanted ones most.

    among   covariance of the figures that could be measured, shape (n, n); across: of the wanted
            ones with these, shape (wanted, n)
    noise   variance of each measurement, shape (n,); size: figures of a block
    """
    blocks = [slice(start, start + size) for start in range(0, len(noise), size)]
    chosen: list[int] = []
    for _ in range(count):
        gains = np.full(len(blocks), -np.inf)
        for index, block in enumerate(blocks):
            if index not in chosen:
                one = among[block, block] + np.diag(noise[block] + _JITTER)
                reach = across[:, block]
                gains[index] = float(np.sum(reach * np.linalg.solve(one, reach.T).T))
        chosen.append(int(np.argmax(gains)))
        block = blocks[chosen[-1]]
        inner = np.linalg.inv(among[block, block] + np.diag(noise[block] + _JITTER))
        told = inner @ among[block, :]
        across = across - across[:, block] @ told
        among = among - among[:, block] @ told
    return chosen
