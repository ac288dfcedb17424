"""What would change a recommendation, and the winner of each load, as facts of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmi_bench.report.formats import number, usd
from lmi_bench.report.values import Facts


def planning_facts(content: Mapping[str, Any]) -> list[Facts]:
    """Sensitivity, frontier and winners by load, where the file has them; empty ones left out."""
    facts = [
        Facts("What would change the answer", tuple(_sensitivity(content))),
        Facts("Cheapest to fastest, none beaten in both", tuple(_frontier(content))),
        Facts("Cheapest layout by load", tuple(_winners(content))),
    ]
    return [each for each in facts if each.items]


def _mappings(content: Any, key: str) -> Iterator[Mapping[str, Any]]:
    values = content.get(key) if isinstance(content, Mapping) else None
    if isinstance(values, list | tuple):
        yield from (each for each in values if isinstance(each, Mapping))


def _sensitivity(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for each in _mappings(content, "sensitivity"):
        yield str(each.get("what") or "?"), str(each.get("text") or "")


def _frontier(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = list(_mappings(content, "frontier"))
    if len(found) > 1:
        for index, each in enumerate(found):
            name = f"{each.get('instances')} × {each.get('instance')}"
            yield str(index + 1), f"{name}, TP {each.get('tensor_parallel')}"


def _winners(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for each in _mappings(content.get("vary"), "intervals"):
        span = f"{number(each.get('from_per_s'))} to {number(each.get('to_per_s'))} req/s"
        fewest, most = each.get("fewest_machines"), each.get("most_machines")
        machines = str(fewest) if fewest == most else f"{fewest} to {most}"
        yield (
            span,
            f"{machines} × {each.get('instance')}, TP {each.get('tensor_parallel')}, "
            f"{usd(each.get('least_usd_per_hour'), per='/h')} to "
            f"{usd(each.get('most_usd_per_hour'), per='/h')}",
        )
