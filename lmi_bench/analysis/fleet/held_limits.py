"""How far below its limit each SLO is held, so that it keeps in a world slower than predicted.

A limit with room is held at limit / s, s the upper end of the interval of the times. The nearer it
is to what a lone request takes, the less of it can be kept back:

    held = lone + (limit - lone) / slope        up to ROOM * s * lone
    held = limit / s                            beyond

so that a stricter limit never leaves more room than a looser one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmi_bench.analysis.fit.uncertainty import TimeFactors
from lmi_bench.analysis.fleet.operating_point import alone_of
from lmi_bench.analysis.level.steady_state import SteadyState
from lmi_bench.core.slo import Slo
from lmi_bench.core.units import s_to_ms

ROOM = 1.3


def held_limit(limit: float, lone: float, factor: float) -> float:
    """The limit to plan with: continuous and rising in `limit`, never above it.

    >>> held_limit(30.0, 10.0, 1.5), held_limit(10.0, 10.0, 1.5), held_limit(9.0, 10.0, 1.5)
    (20.0, 10.0, 9.0)
    """
    if limit <= lone:
        return limit
    if limit >= ROOM * factor * lone:
        return limit / factor
    return lone + (limit - lone) * (ROOM - 1) / (ROOM * factor - 1)


def held_slos(steady: SteadyState, slos: Sequence[Slo], factors: TimeFactors) -> tuple[Slo, ...]:
    """The SLOs with the limits to plan with."""
    alone = alone_of(steady)
    return tuple(
        replace(
            slo,
            limit_ms=held_limit(
                slo.limit_ms,
                s_to_ms(alone.latency_s(slo.metric, slo.statistic, 1.0)),
                factors.of(slo.metric),
            ),
        )
        for slo in slos
    )
