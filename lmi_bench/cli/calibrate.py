"""`lmi-bench calibrate`: an engine's profile from a few levels, and what to measure next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.units import format_interval
from lmi_bench.jobs.settings.calibrate import CalibrateSettings

if TYPE_CHECKING:
    from lmi_bench.analysis.level.cells import MeasuredLevel
    from lmi_bench.jobs.calibrate import Calibration

_SHOWN_LEVELS = 12


@spread_options
def calibrate(settings: CalibrateSettings) -> None:
    """Fit a profile to measured levels: named parameters, their uncertainty, what they miss."""
    from lmi_bench.analysis.model.profiles import profile_to_json
    from lmi_bench.cli.console import print_table, say
    from lmi_bench.core.durable import write_text
    from lmi_bench.jobs.calibrate import calibrate as run

    calibration = run(settings)
    if settings.out is not None:
        write_text(settings.out, profile_to_json(calibration.profile))
    say(calibration.profile.provenance)
    if calibration.is_fitted:
        _print_fit(calibration)
    print_table(
        "Measure next, the most telling first",
        [
            {
                "level": _level(each.level),
                "expected tok/s": format_interval(
                    each.expected.value, each.expected.low, each.expected.high
                ),
            }
            for each in calibration.next_levels
        ],
        left=("level",),
    )
    if settings.out is not None:
        say(f"profile: {settings.out}")


def _print_fit(calibration: Calibration) -> None:
    from lmi_bench.analysis.fit.discrepancy import observations_of
    from lmi_bench.analysis.fit.uncertainty import Z80
    from lmi_bench.analysis.model.profiles import PARAMETER_NAMES
    from lmi_bench.cli.console import print_table, warn

    fit, profile = calibration.fit, calibration.profile
    print_table(
        "Parameters",
        [
            {
                "parameter": name,
                "value": f"{getattr(profile.parameters, name):.4g}",
                "80 % factor": f"{1 + Z80 * profile.log_sd[name]:.2f}",
            }
            for name in PARAMETER_NAMES
            if name in profile.log_sd
        ],
        left=("parameter",),
    )
    pairs = zip(observations_of(fit.cells), fit.residuals, strict=True)
    worst = sorted(pairs, key=lambda pair: abs(pair[1]), reverse=True)
    print_table(
        "Largest misfits",
        [
            {
                "level": _level(item.cell),
                "figure": item.metric,
                "measured / predicted": f"{math.expm1(float(residual)):+.1%}",
            }
            for item, residual in worst[:_SHOWN_LEVELS]
        ],
        left=("level", "figure"),
    )
    for text in profile.notes:
        warn(text)


def _level(cell: MeasuredLevel) -> str:
    setup = cell.setup
    load = f"{cell.concurrency} users" if cell.rate_per_s is None else f"{cell.rate_per_s:g} req/s"
    return (
        f"{setup.shape.name} on {setup.instance.instance_type}, TP {setup.tensor_parallel}, "
        f"{cell.input_tokens} in / {cell.output_tokens} out, {load}"
    )
