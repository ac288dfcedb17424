"""`lmi-bench verify`: the planned load replayed on a target, predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SLO_MISSED
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.verify import VerifySettings

if TYPE_CHECKING:
    from lmi_bench.analysis.fleet.verification import Verified
    from lmi_bench.jobs.verify import Verification
    from lmi_bench.jobs.verify_profile import Learned


@spread_options
def verify(
    settings: VerifySettings,
    json_file: Annotated[Path | None, Option("File for the verification.", ("--json",))] = None,
) -> None:
    """Replay a recommendation's load and say which figures lie inside their intervals.

    Exit 99 if a measured SLO is missed.
    """
    from lmi_bench.cli.console import say, terminal, write_json
    from lmi_bench.cli.sweep_print import print_sweep
    from lmi_bench.jobs.verify import verify as run

    with terminal() as listener:
        found = run(settings, listener)
    print_sweep(found.sweep)
    if found.sweep.interrupted or found.sweep.failed:
        raise typer.Exit(EXIT_INTERRUPTED if found.sweep.interrupted else EXIT_FAILED)
    _print(found)
    if json_file is not None:
        write_json(json_file, found.to_json())
        say(f"verification: {json_file}")
    if found.learned is not None:
        _print_learned(found.learned)
    elif found.outside:
        say(
            "the profile does not describe this target: sweep it at several loads and plan "
            "again on that run (lmi-bench recommend RUN_DIR), or --update-profile P.json here"
        )
    if found.slo_missed:
        raise typer.Exit(EXIT_SLO_MISSED)


def _print(found: Verification) -> None:
    from lmi_bench.cli.console import print_table, say

    rows = [_row(each) for each in found.figures]
    print_table("Predicted against measured", rows, left=("figure",))
    known = [each for each in found.figures if each.verdict != "unknown"]
    inside = len(known) - len(found.outside)
    say(f"{inside} of {len(known)} figures inside their intervals")
    for slo in found.slos:
        why = slo["reason"] or f"measured {slo['measured_ms']:,.1f} ms"
        say(f"SLO {slo['slo']}: {slo['verdict']}, {why}")


def _print_learned(learned: Learned) -> None:
    from lmi_bench.cli.console import say, warn

    if learned.doubted:
        say("figures lie outside: the profile is doubted like one of an engine not yet measured")
    for each in learned.changes:
        say(
            f"  {each.name}: predicted {each.before:+.1%} of measured before, {each.after:+.1%} "
            "after"
        )
    if learned.refused is not None:
        warn(f"the profile stays as it is: {learned.refused}")
    else:
        say(f"profile: {learned.path} (lmi-bench recommend --profile {learned.path})")


def _row(each: Verified) -> dict[str, str]:
    from lmi_bench.core.units import format_figure

    def shown(value: float | None) -> str:
        return "" if value is None else format_figure(value)

    interval = "" if each.low is None else f"{shown(each.low)} to {shown(each.high)}"
    return {
        "figure": each.name,
        "predicted": shown(each.predicted),
        "interval": interval,
        "measured": shown(each.measured),
        "verdict": each.verdict,
    }
