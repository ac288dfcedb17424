"""Builds the content of a report from runs and recommendations."""

import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmi_bench import __version__
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import usable_cores
from lmi_bench.core.run_store import REQUESTS, Run, load_manifest, load_run
from lmi_bench.report.comparison import base_of, comparison_table, verdicts_table
from lmi_bench.report.recommendation_view import build_recommendation_view
from lmi_bench.report.run_view import build_run_view, run_headline
from lmi_bench.report.table import Table
from lmi_bench.report.values import Headline, ReportView, RunView

_LARGE_BYTES = 20_000_000
"""Size of the request files above which several processes are worth their start."""
_MOST_TO_JUDGE = 10_000
"""Requests of all runs up to which the page has `compare`'s verdicts."""


def build_view(
    runs: Sequence[Run | Path],
    recommendations: Sequence[Mapping[str, Any]] = (),
    *,
    labels: Sequence[str] = (),
    title: str = "",
    generated_at: datetime | None = None,
    tables: Sequence[Table] = (),
) -> ReportView:
    """The view of one or more runs and of any recommendations made from them.

    runs             read already, or run folders: those are read one after the other, so that few
                     are in memory at a time, by several processes if they are large
    recommendations  as `recommend --json` writes them; unknown keys are shown as they are
    labels           names for the first runs, in order; the other runs use their own
    tables           shown before the runs, such as those of an optimization job

    Raises InputError when there is nothing to report on or there are more labels than runs.
    """
    if not runs and not recommendations:
        raise InputError("nothing to report on: name a run folder or a recommendation")
    if len(labels) > len(runs):
        raise InputError(f"{len(labels)} labels for {len(runs)} runs: give at most one a run")
    folders = [_path(run) for run in runs]
    manifests = [run.manifest if isinstance(run, Run) else load_manifest(run) for run in runs]
    given = dict(enumerate(labels))
    names = [given.get(at) or each.label or folders[at].name for at, each in enumerate(manifests)]
    anchors = (f"run-{index}" for index in range(1, len(runs) + 1))
    run_views = tuple(_run_views(runs, _distinct(names, folders), anchors))
    advice = tuple(
        build_recommendation_view(content, anchor=f"recommendation-{index}")
        for index, content in enumerate(recommendations, start=1)
    )
    headlines: list[Headline] = []
    if run_views:  # a recommendation alone has its answer in its own section, right below
        headlines += [tile for each in advice for tile in (each.headline, *each.answer)]
    if len(run_views) == 1:
        headlines += run_views[0].headlines
        title = title or run_views[0].curve.label
    else:
        headlines += [run_headline(run) for run in run_views]
        title = title or (f"{len(run_views)} runs compared" if run_views else "Recommendation")
    verdicts = list(_verdicts(runs, run_views))
    return ReportView(
        title=title,
        generated_at=(generated_at or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        headlines=tuple(headlines),
        runs=run_views,
        comparison=comparison_table([run.curve for run in run_views]),
        recommendations=advice,
        tables=tuple(tables),
        verdicts=tuple(each for each in verdicts if isinstance(each, Table)),
        unjudged=tuple(each for each in verdicts if isinstance(each, str)),
    )


def _verdicts(runs: Sequence[Run | Path], views: Sequence[RunView]) -> Iterator[Table | str]:
    """The verdicts on each run against the first measured one, or why there is none."""
    if len(views) < 2:
        return
    first = base_of([view.curve for view in views])
    requests = sum(view.requests for view in views)
    if requests > _MOST_TO_JUDGE:
        yield (
            f"Verdicts take resamples of all {requests:,} requests: lmi-bench compare "
            f"{_path(runs[first])} RUN gives those on one run."
        )
        return
    base = _loaded(runs[first])
    for run, view in zip(runs, views, strict=True):
        if view is not views[first]:
            yield verdicts_table(base, _loaded(run), (views[first].curve.label, view.curve.label))


def _path(run: Run | Path) -> Path:
    return run.path if isinstance(run, Run) else run


def _loaded(run: Run | Path) -> Run:
    return run if isinstance(run, Run) else load_run(run)


def _run_view(run: Run | Path, label: str, anchor: str) -> RunView:
    return build_run_view(_loaded(run), label=label, anchor=anchor)


def _run_views(runs: Sequence[Run | Path], labels: Iterable[str], anchors: Iterable[str]) -> Iterable[RunView]:
    files = [run / REQUESTS for run in runs if isinstance(run, Path)]
    size_bytes = sum(file.stat().st_size for file in files if file.exists())
    workers = min(len(files), usable_cores())
    if workers < 2 or size_bytes < _LARGE_BYTES or sys.platform != "linux":
        return map(_run_view, runs, labels, anchors)
    # forked: a caller's script without a main guard would be run again by a spawned process
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_run_view, runs, labels, anchors))


def _distinct(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Names made distinct by their folder, and by a number where even that is the same."""
    result: list[str] = []
    for name, folder in zip(names, folders, strict=True):
        label = name if names.count(name) == 1 else f"{name} [{folder.name}]"
        attempt, base = 2, label
        while label in result:
            label, attempt = f"{base} #{attempt}", attempt + 1
        result.append(label)
    return result
