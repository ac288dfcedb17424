"""One recommendation from its question to its answer: calibrate, plan, print, save."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.fleet.frontier import frontier
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.fleet.sensitivity import sensitivity
from lmi_bench.analysis.fleet.vary import parse_range, vary_rate
from lmi_bench.analysis.model.profiles import profile_to_json
from lmi_bench.catalog.instances import all_instances
from lmi_bench.cli.console import STDOUT, print_table, progress, say, warn
from lmi_bench.cli.recommend_answer import answer_lines
from lmi_bench.cli.recommend_extras import Extras, unpriced_lines
from lmi_bench.cli.recommend_table import (
    candidate_rows,
    distinct_layouts,
    left_out,
    rejection_lines,
)
from lmi_bench.core.durable import write_text
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.basis import Basis, Question, basis_of

_SHOWN_CANDIDATES = 12
_SHOWN_REASONS = 6


def run(question: Question, *, json_file: Path | None) -> int:
    """Answer, print, save; returns the exit code. Raises InputError for an unusable question."""
    basis = basis_of(question)
    request = RecommendRequest(
        workload=basis.workload,
        profile=basis.profile,
        engine_version=question.engine_version,
        rate_per_s=_rate(question, basis),
        users=question.users,
        think_time_s=question.think_time_s,
        slos=tuple(parse_slo(text) for text in question.slos or basis.slos),
        objective=question.objective,
        instances=question.money.reprice(
            all_instances() if basis.instances is None else basis.instances
        ),
        degrees=question.degrees or None,
        blended_ratio=question.blended_ratio,
        discount=question.discount,
        seed=question.seed,
        purchase=question.money.purchase_plan(),
        availability=question.money.availability_wanted(),
        requirements=question.money.requirements(),
        routing=question.routing,
        look_long=True,
        measured=basis.measured,
        calibrated=basis.accuracy is not None,
        settings=question.engine.axes().settings(dtype=basis.workload.dtype, profile=basis.profile),
    )
    span = None if question.vary is None else parse_range(question.vary)
    with progress() as report:
        answer = recommend(
            request, progress=lambda text, share: report(text, round(100 * share), 100)
        )
        more = Extras(frontier=tuple(frontier(request, answer.candidates)))
        if question.explain:
            report("what would change the answer", 100, 100)
            more = replace(more, sensitivity=tuple(sensitivity(request, answer)))
        if span is not None:
            report("the winner of every load", 100, 100)
            more = replace(more, variation=vary_rate(request, *span))
    content = {**_content(answer, basis), **more.to_json()}
    if json_file is not None:
        write_text(json_file, json.dumps(content, indent=2) + "\n")
    _print(answer, request, basis, more)
    if json_file is not None:
        say(f"recommendation: {json_file}")
    return answer.exit_code


def _rate(question: Question, basis: Basis) -> float | None:
    """The load: as asked, else the scenario's."""
    asked = question.rate_per_s is not None or question.users is not None
    return question.rate_per_s if asked else basis.rate_per_s


def _content(answer: Recommendation, basis: Basis) -> dict[str, Any]:
    content = {
        "model": basis.workload.shape.name,
        "model_as_named": basis.model,
        **answer.to_json(),
    }
    if basis.accuracy is not None:
        content["accuracy"] = basis.accuracy
    content["profile_document"] = json.loads(profile_to_json(basis.profile))
    return content


def _print(answer: Recommendation, request: RecommendRequest, basis: Basis, more: Extras) -> None:
    workload = basis.workload
    say(
        f"{workload.shape.name}, {workload.dtype}, {workload.input_tokens} in / "
        f"{workload.output_tokens} out, {request.describe_load()}, for {request.objective}"
    )
    say(basis.profile.provenance)
    _print_candidates(answer)
    if basis.accuracy is not None:
        print_table("Predicted against measured", _accuracy_rows(basis.accuracy))
    for text in rejection_lines(answer.rejected, _SHOWN_REASONS):
        say(text)
    for text in (*unpriced_lines(answer), *more.lines()):
        say(text)
    print_table("Cheapest layout by load", more.load_rows(), left=("layout",))
    for text in (*basis.notes, *answer.warnings):
        warn(text)
    for text in answer_lines(answer, request):
        say(text)


def _print_candidates(answer: Recommendation) -> None:
    """The best dozen layouts, as much of each as the terminal has room for."""
    layouts = distinct_layouts(answer.candidates)
    rows = candidate_rows(layouts[:_SHOWN_CANDIDATES], STDOUT.width)
    print_table(
        "Candidates, the best first: predicted [80 % interval]",
        rows,
        left=("engine", "limited by", "basis", "price of"),
        whole=("fleet",),
    )
    notes = []
    if any(row[name].endswith(" ?") for row in rows for name in row):
        notes.append("?: within the SLO as predicted, not at the interval's upper end")
    if any("withheld" in row.values() for row in rows):
        notes.append("withheld: too near to saturation to foresee a latency")
    if missing := left_out(rows):
        notes.append(f"no room for {', '.join(missing)}: a wider terminal, or --json")
    if len(layouts) > _SHOWN_CANDIDATES:
        notes.append(f"{len(layouts) - _SHOWN_CANDIDATES} more layouts in the --json file")
    if len(layouts) < len(answer.candidates):
        notes.append("of each layout its best engine setting; the others in the --json file")
    for text in notes:
        say(text)


def _accuracy_rows(accuracy: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for level in accuracy["levels"]:
        row = {"concurrency": str(level["concurrency"])}
        for key, pair in level.items():
            if isinstance(pair, Mapping):
                row[key] = f"{pair['predicted']:.4g} / {pair['measured']:.4g}"
        rows.append(row)
    return rows
