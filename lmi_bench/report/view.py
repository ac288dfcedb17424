"""Builds the content of a report from runs and recommendations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lmi_bench import __version__
from lmi_bench.analysis.results.definitions import DEFINITIONS
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import Run
from lmi_bench.report.comparison import comparison_table
from lmi_bench.report.recommendation_view import build_recommendation_view
from lmi_bench.report.run_view import build_run_view, run_headline
from lmi_bench.report.table import Table
from lmi_bench.report.values import Headline, ReportView


def build_view(
    runs: Sequence[Run],
    recommendations: Sequence[Mapping[str, Any]] = (),
    *,
    labels: Sequence[str] = (),
    title: str = "",
    generated_at: datetime | None = None,
    tables: Sequence[Table] = (),
) -> ReportView:
    """The view of one or more runs and of any recommendations made from them.

    recommendations  as `recommend --json` writes them; unknown keys are shown as they are
    labels           names for the first runs, in order; the other runs use their own
    tables           shown before the runs, such as those of an optimization job

    Raises InputError when there is nothing to report on or there are more labels than runs.
    """
    if not runs and not recommendations:
        raise InputError("nothing to report on: name a run folder or a recommendation")
    if len(labels) > len(runs):
        raise InputError(f"{len(labels)} labels for {len(runs)} runs: give at most one a run")
    own = [run.manifest.label or run.path.name for run in runs[len(labels) :]]
    names = _distinct([*labels, *own], runs)
    run_views = tuple(
        build_run_view(run, label=name, anchor=f"run-{index}")
        for index, (run, name) in enumerate(zip(runs, names, strict=True), start=1)
    )
    advice = tuple(
        build_recommendation_view(content, anchor=f"recommendation-{index}")
        for index, content in enumerate(recommendations, start=1)
    )
    headlines: list[Headline] = []
    if run_views:  # a recommendation alone has its answer in its own section, right below
        headlines += [tile for each in advice for tile in (each.headline, *each.answer)]
    if len(run_views) == 1:
        headlines += run_views[0].headlines
        title = title or run_views[0].label
    else:
        headlines += [run_headline(run) for run in run_views]
        title = title or (f"{len(run_views)} runs compared" if run_views else "Recommendation")
    return ReportView(
        title=title,
        generated_at=(generated_at or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        headlines=tuple(headlines),
        runs=run_views,
        comparison=comparison_table([run.curve for run in run_views]),
        recommendations=advice,
        definitions=DEFINITIONS,
        tables=tuple(tables),
    )


def _distinct(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Names made distinct by their folder, and by a number where even that is the same."""
    result: list[str] = []
    for name, run in zip(names, runs, strict=True):
        label = name if names.count(name) == 1 else f"{name} [{run.path.name}]"
        attempt, base = 2, label
        while label in result:
            label, attempt = f"{base} #{attempt}", attempt + 1
        result.append(label)
    return result
