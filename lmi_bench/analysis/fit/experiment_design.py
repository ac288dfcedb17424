"""Chooses the cells to measure: each in turn lowers the wanted figures' mean variance most.

By parameters and shared model error together, from predictions only."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fit.discrepancy import Observation, observe
from lmi_bench.analysis.fit.fit import Fit, derivatives
from lmi_bench.analysis.level.cells import growth_with_step_times, predict_cell
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric

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

    @cache
    def row(cell: MeasuredLevel) -> tuple[list[Observation], NDArray[np.float64]]:
        profile = fit.profile
        throughput = predict_cell(profile, cell, smooth=True).throughput_tokens_per_s
        growth = None if cell.rate_per_s is None else growth_with_step_times(profile, cell)
        items = [observe(cell, metric, throughput, growth) for metric in metrics]
        return items, derivatives(profile, cell, fit.names, metrics)

    def rows(cells: Sequence[MeasuredLevel]) -> tuple[list[Observation], NDArray[np.float64]]:
        found = [row(cell) for cell in cells]
        items = [item for items, _ in found for item in items]
        return items, np.concatenate([jacobian for _, jacobian in found])

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
    among: NDArray[np.float64], across: NDArray[np.float64], noise: NDArray[np.float64], size: int, count: int
) -> list[int]:
    """Indices of blocks of figures; each next one reduces the wanted figures' variance most.

    among   covariance of the figures that could be measured, shape (n, n)
    across  covariance of the wanted figures with these, shape (wanted, n)
    noise   variance of each measurement, shape (n,)
    size    figures of a block
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
        gain = inner @ among[block, :]
        across = across - across[:, block] @ gain
        among = among - among[:, block] @ gain
    return chosen
