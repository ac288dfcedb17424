"""What a recommendation prints below its table: money, availability, unpriced machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.fleet.fleet_cost import price_line
from lmi_bench.analysis.fleet.vary import Variation
from lmi_bench.analysis.model.engine_setting import EngineSetting

_SHOWN_UNPRICED = 5
_SHOWN_PROBES = 2
_OWN_GAPS = "; an ITL limit is held against each request's own gaps"
_PROBE_REQUESTS = 2000  # a p90 within some per cent, though neighbours move together


def money_lines(chosen: Candidate) -> Iterator[str]:
    """The chosen fleet's price, how it is bought, and what availability adds."""
    cost = chosen.cost
    yield f"price: {price_line(cost)}; bought {cost['purchase']}"
    if cost["discount"] and not cost["purchase"].startswith("spot"):
        yield (
            f"  commitment: pays where a machine is needed for more than "
            f"{cost['break_even_utilisation']:.0%} of the hours (break-even utilisation)"
        )
    if cost["availability"] != "none":
        extra = cost["availability_usd_per_hour"]
        added = "price unknown" if extra is None else f"USD {extra:,.2f} per hour"
        yield (
            f"availability {cost['availability']}: {cost['machines_for_the_load']} machine(s) "
            f"carry the load, {cost['spare_machines']} more add {added}"
        )
    yield f"failure unit: {cost['failure_unit']}"


def unpriced_lines(answer: Recommendation) -> Iterator[str]:
    """Candidates without a price, with the price at which each would win."""
    wins = [
        (price, candidate)
        for candidate in answer.candidates
        if (price := candidate.cost.get("wins_below_usd_per_machine_hour")) is not None
    ]
    best: dict[str, tuple[float, Candidate]] = {}  # of each machine the layout worth most
    for price, candidate in wins:
        if price > best.get(candidate.instance, (0.0, candidate))[0]:
            best[candidate.instance] = (price, candidate)
    for price, candidate in list(best.values())[:_SHOWN_UNPRICED]:
        yield (
            f"no price known: {fleet_text(candidate)} would win below USD {price:,.2f} a machine "
            "and hour"
        )
    if len(best) > _SHOWN_UNPRICED:
        yield f"and {len(best) - _SHOWN_UNPRICED} more unpriced machines, in the --json file"


def fleet_text(candidate: Candidate) -> str:
    """Machines, degree, setting: `2 x ml.p4d.24xlarge, TP 4, int4`."""
    text = f"{candidate.instances} x {candidate.instance}, TP {candidate.tensor_parallel}"
    setting = candidate.setting.describe()
    return f"{text}, {setting}" if setting else text


def measure_next_lines(answer: Recommendation) -> Iterator[str]:
    """What to measure so that the answer rests on less of a forecast, with the commands."""
    best = answer.recommended or answer.nearest
    if best is None:
        return
    question = answer.question
    lengths = (
        f"--input-tokens {question['input_tokens']} --output-tokens {question['output_tokens']}"
    )
    if not question["calibrated"]:
        slots = max(1, int(best.memory["slots_per_copy"]))
        loads = sorted({1, max(1, round(slots**0.5)), slots})
        yield (
            f"measure first, one copy on one {best.instance} at TP {best.tensor_parallel}"
            f"{_set_to(best.setting)}: "
            f"lmi-bench sweep URL {lengths} --concurrency {','.join(map(str, loads))} --out RUN; "
            f"then lmi-bench recommend RUN --measured-on {_place(best)}"
        )
    for probe in answer.measure_next[:_SHOWN_PROBES]:
        instance, degree = probe.layout.instance.instance_type, probe.layout.tensor_parallel
        fleet = f"{probe.machines} x {instance}, TP {degree}"
        setting = _set_to(probe.layout.setting)
        purpose = f"confirms {fleet}"
        if probe.saves_usd_per_hour:
            purpose = f"decides {fleet}, USD {probe.saves_usd_per_hour:,.2f} per hour less"
        elif answer.recommended is None:
            purpose = f"decides {fleet}"
        yield (
            f"measure next, {purpose} (keeps the SLOs with a chance of {probe.chance:.0%}): one "
            f"copy on one {instance} at TP {degree}{setting}: lmi-bench sweep URL {lengths} --rate "
            f"{_rounded_up(probe.rate_per_s)} --requests-per-level {_PROBE_REQUESTS} --out RUN; "
            "add RUN to the runs and recommend again"
        )
    if answer.recommended is not None:
        yield "before buying, replay the load on the fleet: lmi-bench verify REC.json --target URL"


def _set_to(setting: EngineSetting) -> str:
    """How the engine is to be set for a measurement; empty as it is."""
    text = setting.describe()
    return f" with {text}" if text else ""


def _rounded_up(rate_per_s: float) -> str:
    """A rate to four digits, never below it: a level decides on its own rate and lower ones.

    >>> _rounded_up(20 / 7), _rounded_up(3.0)
    ('2.858', '3')
    """
    step = 10.0 ** (math.floor(math.log10(rate_per_s)) - 3)
    return f"{math.ceil(rate_per_s / step - 1e-9) * step:.4g}"


def _place(candidate: Candidate) -> str:
    """The candidate's machine as `--measured-on` takes it."""
    degree = candidate.tensor_parallel
    return candidate.instance if degree == 1 else f"{candidate.instance}:{degree}"


def attainment_lines(chosen: Candidate) -> Iterator[str]:
    """Joint attainment of the planned load."""
    found = chosen.attainment
    if not found:
        return
    if found["reason"]:
        yield f"joint attainment: not simulated, {found['reason']}"
        return
    yield (
        f"joint attainment: {found['joint_attainment']:.2%} of {found['requests']:,} simulated "
        f"requests in {found['minutes']:.0f} minutes meet every SLO ({found['routing']} routing)"
        f"{_OWN_GAPS if any(each.slo.startswith('itl') for each in chosen.slos) else ''}"
    )


def worst_minutes(chosen: Candidate, slo: str) -> str:
    """The SLO's statistic over the five minutes in which it is worst; empty where not simulated."""
    found = chosen.attainment
    if not found or found["reason"] or slo not in found["worst_5_minutes_ms"]:
        return ""
    worst_ms = found["worst_5_minutes_ms"][slo]
    shown = "too few requests to tell" if worst_ms is None else f"{worst_ms:,.0f} ms"
    return f"; worst five minutes: {shown}"


@dataclass(frozen=True, slots=True)
class Extras:
    """What is asked for beside the ranking."""

    frontier: tuple[Candidate, ...] = ()
    sensitivity: tuple[dict[str, Any], ...] = ()
    variation: Variation | None = None

    def to_json(self) -> dict[str, Any]:
        """Keys of the recommendation file."""
        content: dict[str, Any] = {
            "frontier": [
                {
                    "instance": each.instance,
                    "instances": each.instances,
                    "tensor_parallel": each.tensor_parallel,
                    "setting": each.setting.describe() or None,
                }
                for each in self.frontier
            ]
        }
        if self.sensitivity:
            content["sensitivity"] = list(self.sensitivity)
        if self.variation is not None:
            content["vary"] = self.variation.to_json()
        return content

    def lines(self) -> Iterator[str]:
        """The frontier and the sensitivity for people."""
        if len(self.frontier) > 1:
            named = (fleet_text(each) for each in self.frontier)
            yield f"cheapest to fastest (ms/token p90), none beaten in both: {'; '.join(named)}"
        for item in self.sensitivity:
            yield f"would change the answer? {item['text']}"

    def load_rows(self) -> list[dict[str, Any]]:
        """The winner of each stretch of loads, as rows of a table."""
        if self.variation is None:
            return []
        crossovers = [*self.variation.crossovers, None]
        rows = []
        for each, crossover in zip(self.variation.intervals, crossovers, strict=True):
            machines = f"{each.fewest_machines}"
            if each.most_machines != each.fewest_machines:
                machines += f" to {each.most_machines}"
            rows.append(
                {
                    "above req/s": f"{each.from_per_s:.4g}",
                    "up to": f"{each.to_per_s:.4g}",
                    "machines": machines,
                    "layout": f"{each.instance}, TP {each.tensor_parallel} x {each.copies}",
                    "USD/h": f"{each.least_usd_per_hour:,.2f} to {each.most_usd_per_hour:,.2f}",
                    "crossover if as predicted": (
                        ""
                        if crossover is None
                        else f"{crossover.value:.4g} [{crossover.low:.4g} to {crossover.high:.4g}]"
                    ),
                }
            )
        return rows
