"""A scenario's workload as the planner takes it: kinds of request, burstiness, rate."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_bench.analysis.level.layouts import RequestKind, Workload
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_lengths
from lmi_bench.core.scenario import DEFAULT_MODEL, Scenario, load_scenario
from lmi_bench.core.traces import read_trace
from lmi_bench.models.shape import ModelShape

_MOST_KINDS = 500
_SEED = 20_261_121  # of lengths that are drawn from distributions


@dataclass(frozen=True, slots=True)
class ScenarioWorkload:
    """What a scenario asks.

    kinds       of request; one of them where all are equal
    rate_per_s  its highest; None for a closed loop
    model       None where the scenario leaves it out
    notes       what of the scenario a plan does not know
    """

    kinds: tuple[RequestKind, ...]
    burstiness: float
    rate_per_s: float | None
    model: str | None
    slos: tuple[str, ...]
    notes: tuple[str, ...]

    def planned(self, shape: ModelShape, dtype: str) -> Workload:
        """The workload of that model in that number format."""
        if len(self.kinds) == 1:
            (kind,) = self.kinds
            return Workload(
                shape, dtype, kind.input_tokens, kind.output_tokens, burstiness=self.burstiness
            )
        return Workload.mixed(shape, dtype, self.kinds, burstiness=self.burstiness)


def read_workload(path: Path) -> ScenarioWorkload:
    """Read a scenario file; raises InputError where its requests have no known lengths."""
    scenario = load_scenario(path)
    load = scenario.load
    return ScenarioWorkload(
        kinds=tuple(_kinds(scenario, path)),
        burstiness=load.burstiness if load.arrivals == "gamma" else 1.0,
        rate_per_s=_rate(scenario),
        model=None if scenario.model == DEFAULT_MODEL else scenario.model,
        slos=scenario.slo,
        notes=tuple(_notes(scenario)),
    )


def _kinds(scenario: Scenario, path: Path) -> Iterator[RequestKind]:
    workload = scenario.workload
    if workload.has_sessions or workload.dataset is not None:
        raise InputError(
            f"{path}: a plan needs lengths: give equal requests, mix, input_lengths or a trace, "
            "not conversations or a dataset"
        )
    if workload.mix:
        for kind in workload.mix:
            yield RequestKind(kind.input_tokens, kind.output_tokens, kind.share)
    elif workload.trace is not None:
        requests = read_trace(Path(workload.trace)).requests
        yield from _thinned([(each.input_tokens, each.output_tokens) for each in requests])
    elif workload.input_lengths is not None or workload.output_lengths is not None:
        draw = random.Random(_SEED)
        asked = parse_lengths(workload.input_lengths or str(workload.input_tokens))
        told = parse_lengths(workload.output_lengths or str(workload.output_tokens))
        yield from _thinned([(asked.draw(draw), told.draw(draw)) for _ in range(_MOST_KINDS)])
    else:
        yield RequestKind(workload.input_tokens, workload.output_tokens, 1.0)


def _thinned(pairs: Sequence[tuple[int, int]]) -> Iterator[RequestKind]:
    """Every n-th of the pairs in order of length, so that at most _MOST_KINDS remain."""
    step = -(-len(pairs) // _MOST_KINDS)
    for asked, told in sorted(pairs)[step // 2 :: step]:
        yield RequestKind(asked, told, 1.0)


def _rate(scenario: Scenario) -> float | None:
    if scenario.load.rate_per_s is not None:
        return max(scenario.load.rate_per_s)
    if scenario.workload.trace is not None and scenario.load.concurrency is None:
        return read_trace(Path(scenario.workload.trace)).rate_per_s * max(scenario.load.speed)
    return None


def _notes(scenario: Scenario) -> Iterator[str]:
    if scenario.workload.shared_prefix:
        yield (
            f"{scenario.workload.shared_prefix} shared tokens of each prompt are planned as if "
            "they were computed every time: with a prefix cache fewer machines may do"
        )
    if scenario.workload.trace is not None:
        yield "a trace's lengths and mean rate are planned with, not its times"
