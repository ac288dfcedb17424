"""Measured serving configurations: the cheapest and the fastest of each model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.catalog.published import PublishedCell

LOWER_COST, LOWER_LATENCY = "lower cost", "lower latency"


@dataclass(frozen=True, slots=True)
class Preset:
    """The best measured cell for a goal.

    usd_per_1m_output  of all instances of the endpoint; None without a price or throughput
    """

    goal: str
    cell: PublishedCell
    usd_per_1m_output: float | None


def presets(
    cells: Iterable[PublishedCell], price_usd_per_hour: Mapping[str, float | None]
) -> list[Preset]:
    """Two for each (model, input, output), in order of first appearance.

    price_usd_per_hour  of one instance, by its type
    """
    found: list[Preset] = []
    groups: dict[tuple[str, int, int], list[PublishedCell]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.input_tokens, cell.output_tokens), []).append(cell)
    for group in groups.values():
        priced = [(usd, cell) for cell in group if (usd := _usd(cell, price_usd_per_hour))]
        if priced:
            usd, cheapest = min(priced, key=lambda each: each[0])
            found.append(Preset(LOWER_COST, cheapest, usd))
        timed = [
            (latency, cell.replicas * (price_usd_per_hour.get(cell.instance_type) or 0.0), cell)
            for cell in group
            if (latency := cell.latency_s_per_token) is not None
        ]
        if timed:  # if equal, the cheaper machine
            _, _, fastest = min(timed, key=lambda each: each[:2])
            found.append(Preset(LOWER_LATENCY, fastest, _usd(fastest, price_usd_per_hour)))
    return found


def _usd(cell: PublishedCell, prices: Mapping[str, float | None]) -> float | None:
    price = prices.get(cell.instance_type)
    fleet = None if price is None else cell.replicas * price
    return usd_per_1m_tokens(fleet, cell.throughput_tokens_per_s)
