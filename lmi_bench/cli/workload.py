"""`lmi-bench workload from`: recorded traffic as a scenario to sweep and to plan with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.workload import WorkloadFromSettings

if TYPE_CHECKING:
    from lmi_bench.analysis.level.layouts import RequestKind
    from lmi_bench.jobs.workload import Summary

workload = typer.Typer(
    name="workload", help="Workloads from what is seen in production.", no_args_is_help=True
)


@workload.callback()
def _workload() -> None:
    """Workloads from what is seen in production."""


@workload.command("from")
@spread_options
def from_source(settings: WorkloadFromSettings) -> None:
    """Write joint lengths, peak five-minute rate, burstiness and shared prefix as a scenario.

    A daily curve, where the source has one, is written beside it for `plan-day --load`. What the
    source does not tell is listed.
    """
    from lmi_bench.cli.console import say
    from lmi_bench.jobs.workload import workload_from

    written = workload_from(settings)
    _print(written.summary)
    say(f"scenario: {written.scenario}")
    if written.day is not None:
        say(f"daily curve: {written.day} (lmi-bench plan-day REC.json --load {written.day})")
    say(f"next: lmi-bench recommend --workload {written.scenario} --model NAME --slo ...")


def _print(found: Summary) -> None:
    from lmi_bench.cli.console import print_table, say

    print_table(
        "Kinds of request",
        [
            {
                "input tokens": f"{kind.input_tokens:,}",
                "output tokens": f"{kind.output_tokens:,}",
                "share": f"{kind.share:.1%}",
            }
            for kind in found.kinds
        ],
    )
    for text in (*_facts(found), *found.notes):
        say(text)
    for text in found.unknown:
        say(f"not known: {text}")


def _facts(found: Summary) -> Iterator[str]:
    yield (
        f"mean lengths: {_mean(found.kinds, 'input_tokens'):,.0f} in / "
        f"{_mean(found.kinds, 'output_tokens'):,.0f} out"
        + ("" if found.correlation is None else f", correlation {found.correlation:+.2f}")
    )
    if found.peak_per_s is not None and found.mean_per_s is not None:
        yield (
            f"rate: {found.peak_per_s:,.4g} req/s in the fullest five minutes, "
            f"{found.mean_per_s:,.4g} on average"
        )
    if found.bursts is not None and found.bursts.shape is not None:
        yield f"burstiness {found.bursts.shape:.3g} (1 is Poisson), by {found.bursts.how}"
    if found.shared_tokens is not None and found.repeated is not None:
        yield (
            f"shared prefix: {found.shared_tokens:,} tokens of at least half of the prompts; "
            f"{found.repeated:.0%} of all prompt text repeats the beginning of another prompt"
        )


def _mean(kinds: Sequence[RequestKind], name: str) -> float:
    return sum(float(getattr(kind, name)) * kind.share for kind in kinds)
