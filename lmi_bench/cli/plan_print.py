"""What the planning commands print: predictions, calibrations, errors, verifications, days."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.fit.discrepancy import observations_of
from lmi_bench.analysis.fit.forecast import CAUSES, Forecast
from lmi_bench.analysis.fit.measured_tables import TableRow
from lmi_bench.analysis.fit.uncertainty import Z80, Estimate
from lmi_bench.analysis.fit.validation import LoadUnderSlo, accuracies
from lmi_bench.analysis.fleet import accelerator_comparison as machines
from lmi_bench.analysis.fleet.day import DayResult
from lmi_bench.analysis.fleet.money import usd_text
from lmi_bench.analysis.fleet.portfolio import Portfolio
from lmi_bench.analysis.fleet.verification import Verified
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.core.units import HOURS_PER_MONTH, format_figure, format_interval, plural
from lmi_bench.jobs import calibrate
from lmi_bench.jobs.fleet import AcceleratorComparison, PlannedDay, PlayedPolicy
from lmi_bench.jobs.predict import Prediction
from lmi_bench.jobs.verify import Learned, Verification

_COLUMNS = {
    "tok/s": "throughput_tokens_per_s",
    "ms/token": "latency_ms_per_token",
    "TPOT ms": "tpot_ms",
    "TTFT ms": "ttft_ms",
}
_SHOWN_LEVELS = 12
_SHOWN_WARNINGS = 5
_HOURS_A_DAY = 24
_TABLES = (
    ("latency", "Lowest latency: one request, predicted"),
    ("throughput", "Highest throughput of one machine, predicted"),
    ("cost", "Lowest cost of 1M output tokens at saturation, predicted"),
)


def print_prediction(prediction: Prediction) -> None:
    """The set-up, a row for each load, and what limits it."""
    settings, setup = prediction.settings, prediction.setup
    speculation = setup.speculation
    copies = "" if settings.replicas == 1 else f", {settings.replicas} copies"
    cache = "" if settings.kv_dtype is None else f", {settings.kv_dtype} cache"
    split = f", {setup.parallelism.label}" if setup.parallelism.label else ""
    if (workers := settings.workers) is not None:
        copies = f", {workers[0]} prefill and {workers[1]} decode workers"
    title = f"{settings.input_tokens} in / {settings.output_tokens} out"
    if settings.is_simulated:
        title = "simulated with the engine's scheduler"
    say(
        f"{setup.shape.name}, {setup.dtype}{cache}, on {setup.instance.instance_type}, "
        f"TP {setup.tensor_parallel}{split}{copies}, {title}"
    )
    if speculation is not None:
        say(
            f"speculation: {speculation.draft_tokens} tokens drafted a step, each accepted with "
            f"probability {speculation.acceptance:.2f}: {speculation.tokens_per_step:.2f} tokens "
            "a step"
        )
    say(prediction.profile.provenance)
    rows = [_prediction_row(each) for each in (*prediction.forecasts, *prediction.simulated)]
    give_way = ("capacity tok/s", "ms/token", "binds", "TTFT p90 ms", "TPOT ms")
    print_table("Predictions with 80 % intervals", rows, left=("binds",), give_way=give_way)
    say(*dict.fromkeys(_explanations(prediction)))
    warn(*prediction.warnings)


def _explanations(prediction: Prediction) -> Iterator[str]:
    for each in prediction.forecasts:
        yield f"{each.regime}: {CAUSES[each.regime or '']}"
    for one in prediction.simulated:
        if one.errors:
            yield f"{one.errors} of {one.requests} requests at load {one.load_name} do not fit"
        if (hit := one.prefix_hit) is not None:
            yield (
                f"prefix cache at load {one.load_name}: {hit.value:.1%} of the prompt tokens found "
                f"({hit.low:.1%} to {hit.high:.1%})"
            )
    for any_load in (*prediction.forecasts, *prediction.simulated):
        if reason := any_load.uncertainty.withheld:
            yield f"no latency where {reason}"
        elif any_load.figures["tpot_ms"] is None:
            yield "TPOT -: an answer of one token has none"


def _prediction_row(each: Forecast) -> dict[str, Any]:
    why = {"TPOT ms": "-", "TTFT p90 ms": "too few requests"} if each.uncertainty.withheld is None else {}
    columns = _COLUMNS if each.regime else {**_COLUMNS, "TTFT p90 ms": "ttft_p90_ms"}
    row = {title: _interval(each.figures[key], absent=why.get(title, "withheld")) for title, key in columns.items()}
    row = {"load": each.load_name} | row
    row["capacity tok/s"] = _interval(each.uncertainty.capacity_tokens_per_s)
    return row | ({} if each.regime is None else {"binds": each.regime})


def _interval(figure: Estimate | None, *, absent: str = "withheld") -> str:
    return absent if figure is None else format_interval(figure.value, figure.low, figure.high)


def _load(cell: MeasuredLevel, users: str = "", rate: str = "/s") -> str:
    if cell.rate_per_s is None:
        return f"{cell.concurrency}{users}"
    return f"{cell.rate_per_s:g}{rate}"


def print_captured(levels: Sequence[Mapping[str, Any]]) -> None:
    """The measured levels of a capture, as its profile has them."""
    names = ("in", "out", "users", "requests", "s", "tok/s", "TTFT ms", "TPOT ms", "check")
    shown = [[_shown(value).partition(" (")[0] for value in level.values()] for level in levels]
    rows = [dict(zip(names, row, strict=True)) for row in shown]
    print_table("Measured", rows, left=("check",), give_way=("requests",))


def print_calibration(calibration: calibrate.Calibration) -> None:
    """The fitted parameters, the largest errors, and the levels to measure next."""
    say(calibration.profile.provenance)
    if calibration.is_fitted:
        _print_fit(calibration)
    rows = [
        {"level": _level(level), "expected tok/s": _interval(expected)} for level, expected in calibration.next_levels
    ]
    print_table("Measure next, the most informative first", rows, left=("level",))


def _print_fit(calibration: calibrate.Calibration) -> None:
    fit, profile = calibration.fit, calibration.profile
    rows = [
        {
            "parameter": name,
            "value": f"{getattr(profile.parameters, name):.4g}",
            "80 % factor": f"{math.exp(Z80 * profile.log_sd[name]):.2f}",
        }
        for name in PARAMETER_NAMES
        if name in profile.log_sd
    ]
    print_table("Parameters", rows, left=("parameter",))
    pairs = zip(observations_of(fit.cells), fit.residuals, strict=True)
    worst = sorted(pairs, key=lambda pair: abs(pair[1]), reverse=True)
    rows = [
        {
            "level": _level(item.cell),
            "figure": item.metric,
            "measured / predicted": f"{math.expm1(float(residual)):+.1%}",
        }
        for item, residual in worst[:_SHOWN_LEVELS]
    ]
    print_table("Largest errors of the fit", rows, left=("level", "figure"))
    warn(*profile.notes)


def _level(cell: MeasuredLevel) -> str:
    setup = cell.setup
    return (
        f"{setup.shape.name} on {setup.instance.instance_type}, TP {setup.tensor_parallel}, "
        f"{cell.input_tokens} in / {cell.output_tokens} out, {_load(cell, ' users', ' req/s')}"
    )


def print_validation(validation: calibrate.Validation) -> None:
    """The lines that were calibrated on, the errors on the others, and rates under limits."""
    judged, warnings = validation.judged, validation.warnings
    chosen = [row for row in judged if row.calibrated]
    rows = [
        {"line": row.row.number + 2, **_setup_row(row.row), "load": _load(row.row.cell)}
        for row in chosen
        if row.row.cell is not None
    ]
    title = f"Calibrated on {plural(len(chosen), 'line')}"
    print_table(title, rows, left=("engine", "model", "machine"))
    found = accuracies(judged)
    if not found:
        note("no measured line is left to judge: each was calibrated on or cannot be used")
    print_table(
        "Errors on lines that were not calibrated on, and 80 % intervals",
        [_in_percent(entry.to_json()) for entry in found],
        left=("slice", "figure"),
    )
    print_table(
        "Highest load of the table under a limit: users, or req/s",
        [_under_slo_row(entry) for entry in validation.under_slo],
        left=("engine", "model", "machine", "limit"),
    )
    warn(*warnings[:_SHOWN_WARNINGS])
    if len(warnings) > _SHOWN_WARNINGS:
        warn(f"and {len(warnings) - _SHOWN_WARNINGS} more such warnings")


def print_shipped(shipped: calibrate.ShippedErrors) -> None:
    """The errors of the shipped profiles on their published tables."""
    print_table(
        "Errors of the shipped profiles, and 80 % intervals",
        [_in_percent(row) for row in shipped.to_json()],
        left=("profile", "table", "lines of", "figure"),
    )
    say(
        "fitted models: the profile was fitted to lines of these models, so the errors show how "
        "well it describes known data; other models: predicted without such data"
    )
    for table in shipped.absent:
        note(f"{table.profile}: {table.file} does not ship; to judge it, set {calibrate.TABLES_VARIABLE} to its folder")


def _in_percent(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: f"{row[name]:.1%}" for name in ("median", "p90", "half-width")}
    shown["figure"] = row["figure"].partition("_")[0].replace("throughput", "tok/s")
    return {**row, **shown, "covered": f"{row['covered']:.0%}"}


def _under_slo_row(entry: LoadUnderSlo) -> dict[str, Any]:
    def shown(value: float | None) -> str:
        return "none" if value is None else f"{value:g}{'/s' if entry.is_rate else ''}"

    return {
        **_setup_row(entry.row),
        "limit": entry.limit,
        "measured": shown(entry.measured),
        "predicted": f"{shown(entry.predicted)} ({shown(entry.low)} to {shown(entry.high)})",
    }


def _setup_row(row: TableRow) -> dict[str, Any]:
    cell = row.cell
    assert cell is not None
    return {
        "engine": row.engine,
        "model": cell.setup.shape.name,
        "machine": cell.setup.instance.instance_type,
        "TP": cell.setup.tensor_parallel,
        "in / out": f"{cell.input_tokens} / {cell.output_tokens}",
    }


def print_verification(found: Verification) -> None:
    """How many figures and which SLOs hold, then each figure, predicted against measured."""
    known = [each for each in found.figures if each.verdict != "unknown"]
    inside = len(known) - len(found.outside)
    say(f"{inside} of {len(known)} figures inside their intervals")
    for slo in found.slos:
        why = slo.reason or f"measured {slo.measured_ms:,.1f} ms"
        verdict = "not measured" if slo.verdict == "unsupported" else slo.verdict
        say(f"SLO {slo.slo}: {verdict}, {why}")
    rows = map(_verified_row, found.figures)
    print_table("Predicted against measured", [*rows], left=("figure",))


def _shown(value: Any) -> str:
    return format_figure(value) if isinstance(value, float) else "" if value is None else str(value)


def _verified_row(each: Verified) -> dict[str, str]:
    figure = each.figure
    return {
        "figure": each.name,
        "predicted": "" if figure is None else _shown(figure.value),
        "interval": "" if figure is None else f"{_shown(figure.low)} to {_shown(figure.high)}",
        "measured": _shown(each.measured),
        "verdict": each.verdict,
    }


def print_learned(learned: Learned) -> None:
    """What the measurement changed in the profile."""
    if learned.doubted:
        say(
            "figures lie outside their intervals: the profile now counts as uncertain as that of "
            "an engine not yet measured"
        )
    for name, before, after in learned.changes:
        say(f"  {name}: predicted {before:+.1%} of measured before, {after:+.1%} after")
    if learned.refused is not None:
        warn(f"the profile is unchanged: {learned.refused}")
    else:
        say(f"profile: {learned.path} (lmi-bench recommend --profile {learned.path})")


def print_day(day: PlannedDay) -> None:
    """Scaling against a flat fleet, and what to commit to."""
    plan = day.plan
    say(*(f"in the recommendation {text}" for text in day.caveats))
    say(
        f"load {min(day.load.rates_per_s):.4g} to {day.load.peak_per_s:.4g} req/s, {day.machine} "
        f"carries {day.capacity_per_s:.4g} req/s and serves {day.start_up.total_s:,.0f} s after "
        "it is needed"
    )
    rows = [
        _day_row(f"scaled at {plan.scaling.target_per_s:.3g} req/s a machine", plan.scaled, day),
        _day_row(f"flat, {plural(plan.flat_machines, 'machine')}", plan.flat, day),
    ]
    print_table("A day", rows, left=("fleet",))
    say(f"chosen: {'scaling' if plan.scales else 'the flat fleet'}: {plan.why}")
    if day.policies:
        rows = [_policy_row(each, day) for each in day.policies]
        print_table("Policies, request by request", rows, left=("policy",))
    committed = day.commitment
    if committed is not None:
        say(
            f"commit to {plural(committed.machines, 'machine')} at {day.discount:.0%} off: USD "
            f"{committed.usd_per_day:,.2f} a day, {committed.unused_usd:,.2f} of it unused"
        )


def _policy_row(policy: PlayedPolicy, day: PlannedDay) -> dict[str, Any]:
    values = policy.to_json(day.price)
    cost, changes = values["usd_per_day"], [after - before for _, before, after in values["events"]]
    return {
        "policy": policy.name,
        "in time": f"{values['attainment']:.2%}",
        "wait p99 s": f"{values['wait_p99_s']:,.1f}",
        "longest wait s": f"{values['worst_wait_s']:,.0f}",
        "most machines": values["peak_machines"],
        "ups": sum(change > 0 for change in changes),
        "downs": sum(change < 0 for change in changes),
        "machine hours": f"{values['machine_hours']:,.1f}",
        "USD a day": "" if cost is None else f"{cost:,.2f}",
    }


def _day_row(fleet: str, result: DayResult, day: PlannedDay) -> dict[str, Any]:
    cost = result.cost_usd(day.price)
    return {
        "fleet": fleet,
        "SLO kept": f"{result.slo_share:.2%}",
        "most machines": result.peak_machines,
        "launches": result.launches,
        "machine hours": f"{result.machine_hours:,.1f}",
        "longest wait s": f"{result.worst_wait_s:,.0f}",
        "USD a day": "" if cost is None else f"{cost:,.2f}",
        "USD a month": "" if cost is None else f"{cost * HOURS_PER_MONTH / _HOURS_A_DAY:,.0f}",
    }


def print_accelerators(comparison: AcceleratorComparison, top: int) -> None:
    """The four steps, the best machines by latency, throughput and cost, and sharding."""
    workload, figures = comparison.workload, comparison.figures
    say(
        f"{workload.shape.name}, {workload.dtype}, {workload.input_tokens} in / "
        f"{workload.output_tokens} out; no load is stated: one request alone, and one machine at "
        "saturation"
    )
    print_table(
        "Accelerators in four steps, the cheapest bandwidth first",
        [_step_row(row) for row in comparison.steps],
        left=("accelerator", "price of"),
    )
    for by, title in _TABLES:
        rows = [_machine_row(each) for each in machines.best_by_machine(figures, by=by)[:top]]
        print_table(title, rows, left=("instance",))
    print_table(
        "Several copies against one copy over all devices, predicted",
        [
            {
                "instance": best.layout.instance.instance_type,
                "best layout": f"TP {best.layout.tensor_parallel} x {best.layout.copies}",
                "tok/s": f"{best.throughput_tokens_per_s:,.0f}",
                "tok/s of one copy": f"{whole.throughput_tokens_per_s:,.0f}",
                "gain": f"{best.throughput_tokens_per_s / whole.throughput_tokens_per_s:.2f}",
                "ms/token alone": format_figure(best.latency_ms_per_token),
                "of one copy": format_figure(whole.latency_ms_per_token),
            }
            for best, whole in machines.sharding(figures)[:top]
        ],
        left=("instance", "best layout"),
    )
    if not figures and comparison.rejected:
        warn(f"the model runs on none of these machines: {comparison.rejected[0].reason}")
    say(f"predictions: {comparison.profile.provenance}; they are estimates until calibrated on a sweep")


def _step_row(row: machines.FourSteps) -> dict[str, Any]:
    machine, price = row.machine, row.usd_per_hour_device
    bandwidth_price = None if row.usd_per_hour_gb_s is None else 1e3 * row.usd_per_hour_gb_s
    source = f"{machine.instance_type}, {machine.price_region}, {machine.price_date}"
    mark = "~" if machine.is_estimated else ""
    devices = "" if row.critical_batch is None else str(row.devices or "> 64")
    return {
        "accelerator": row.accelerator,
        "1: B*": format_figure(row.critical_batch),
        "2: KV at B* GiB": format_figure(row.kv_gib),
        "3: devices": devices if row.holds or not devices else f"{devices}, no machine",
        "4: USD/h per TB/s": mark + format_figure(bandwidth_price),
        "USD/h a device": mark + format_figure(price),
        "price of": "" if price is None else source,
    }


def _machine_row(each: machines.MachineFigures) -> dict[str, Any]:
    layout = each.layout
    mark = "~" if layout.instance.is_estimated else ""
    return {
        "instance": layout.instance.instance_type,
        "TP": layout.tensor_parallel,
        "copies": layout.copies,
        "ms/token alone": format_figure(each.latency_ms_per_token),
        "tok/s full": f"{each.throughput_tokens_per_s:,.0f}",
        "USD/1M out": mark + format_figure(each.usd_per_1m_output),
        "USD/h": mark + format_figure(layout.instance.price_usd_per_hour),
    }


def print_portfolio(answer: Portfolio) -> None:
    """The shared machines, those of an endpoint each, and what sharing saves."""
    plans = {"shared": answer.groups, "an endpoint each": answer.separate}
    rows = [
        {
            "plan": plan,
            "fleet": f"{fleet.machines} x {fleet.instance}",
            "models": ", ".join(
                f"{name}: {need.copies} at TP {need.tensor_parallel}" for name, need in fleet.models.items()
            ),
            "USD/h": usd_text(fleet.usd_per_hour, estimated=fleet.estimated),
        }
        for plan, fleets in plans.items()
        for fleet in fleets
    ]
    print_table("Models on machines", rows, left=("models", "plan"), whole=("fleet",))
    for group in answer.groups:
        for place, machine in enumerate(group.placed, start=1):
            copies = ", ".join(f"{name} (TP {degree})" for name, degree in machine)
            say(f"{group.instance} no. {place}: {copies}")
    shared_usd, separate_usd = answer.usd_per_hour, answer.separate_usd_per_hour
    shared = usd_text(shared_usd, estimated=any(each.estimated for each in answer.groups))
    separate = usd_text(separate_usd, estimated=any(each.estimated for each in answer.separate))
    say(
        f"shared: USD {shared} per hour; an endpoint each: USD {separate}; "
        f"sharing saves USD {separate_usd - shared_usd:,.2f} per hour"
    )
    say(
        "a device serves one model; models on one machine fail together, and the plan does not "
        "include how they slow each other down: measure both at once before buying"
    )
