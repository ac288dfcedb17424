"""`lmi-bench recommend`: which instance, TP degree, replicas and price meet the SLOs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.recommend import RecommendSettings

if TYPE_CHECKING:
    from lmi_bench.analysis.fleet.portfolio import Portfolio, SharedFleet
    from lmi_bench.jobs.recommend import Advice


@spread_options
def recommend(
    settings: RecommendSettings,
    json_file: Annotated[Path | None, Option("File for the recommendation.", ("--json",))] = None,
) -> None:
    """Rank instances, TP degrees and replicas by cost, latency or throughput under SLOs.

    Without a load: one machine, as full as the limits allow. With a run, its levels calibrate
    the step-time model first. Engine settings may be several values between commas: the best
    combination wins.
    """
    from lmi_bench.cli.console import say, terminal, write_json
    from lmi_bench.jobs.portfolio import plan_portfolio
    from lmi_bench.jobs.recommend import recommend as run

    if settings.portfolio is not None:
        with terminal() as listener:
            portfolio = plan_portfolio(settings, listener)
        _print_portfolio(portfolio)
        if json_file is not None:
            write_json(json_file, portfolio.to_json())
            say(f"portfolio: {json_file}")
        return
    with terminal() as listener:
        advice = run(settings, listener)
    write_json(json_file, advice.to_json())
    _print(advice)
    if json_file is not None:
        say(f"recommendation: {json_file}")
    if advice.answer.exit_code:
        raise typer.Exit(advice.answer.exit_code)


def _print(advice: Advice) -> None:
    from lmi_bench.cli.console import print_table, say, warn
    from lmi_bench.cli.recommend_answer import answer_lines, beside_lines, load_rows, unpriced_lines
    from lmi_bench.cli.recommend_table import accuracy_rows, print_candidates, rejection_lines

    answer, request, basis = advice.answer, advice.request, advice.basis
    workload = basis.workload
    say(
        f"{workload.shape.name}, {workload.dtype}, {workload.input_tokens} in / "
        f"{workload.output_tokens} out, {request.describe_load()}, for {request.objective}"
    )
    say(basis.profile.provenance)
    print_candidates(answer.candidates)
    if basis.accuracy is not None:
        print_table("Predicted against measured", accuracy_rows(basis.accuracy))
    for text in (*rejection_lines(answer.rejected), *unpriced_lines(answer), *beside_lines(advice)):
        say(text)
    if advice.variation is not None:
        print_table("Cheapest layout by load", load_rows(advice.variation), left=("layout",))
    for text in (*basis.notes, *answer.warnings):
        warn(text)
    for text in answer_lines(answer, request):
        say(text)


def _print_portfolio(answer: Portfolio) -> None:
    from lmi_bench.cli.console import print_table, say

    rows = [
        *_fleet_rows(answer.groups, "shared"),
        *_fleet_rows(answer.separate, "an endpoint each"),
    ]
    print_table("Models on machines", rows, left=("models", "plan"), whole=("fleet",))
    for group in answer.groups:
        for number, machine in enumerate(group.placed, start=1):
            copies = ", ".join(f"{name} (TP {degree})" for name, degree in machine)
            say(f"{group.instance} no. {number}: {copies}")
    saved = answer.separate_usd_per_hour - answer.usd_per_hour
    say(
        f"shared: USD {answer.usd_per_hour:,.2f} per hour; an endpoint each: USD "
        f"{answer.separate_usd_per_hour:,.2f}; sharing saves USD {saved:,.2f} per hour"
    )
    say(
        "a device serves one model; models on one machine fail together, and what one host costs "
        "several of them is not in the plan: measure both at once before buying"
    )


def _fleet_rows(fleets: tuple[SharedFleet, ...], plan: str) -> list[dict[str, str]]:
    return [
        {
            "plan": plan,
            "fleet": f"{fleet.machines} x {fleet.instance}",
            "models": ", ".join(
                f"{name}: {need.copies} at TP {need.tensor_parallel}"
                for name, need in zip(fleet.names, fleet.needs, strict=True)
            ),
            "USD/h": f"{fleet.usd_per_hour:,.2f}",
        }
        for fleet in fleets
    ]
