"""`lmi-bench validate`: how far predictions are off on a table of measured levels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.core.units import plural
from lmi_bench.jobs.settings.calibrate import ValidateSettings

if TYPE_CHECKING:
    from lmi_bench.analysis.fit.validation import Accuracy, Judged
    from lmi_bench.jobs.validate import ShippedErrors, Validation

_SHOWN_WARNINGS = 5


@spread_options
def validate(
    settings: ValidateSettings,
    json_file: Annotated[Path | None, Option("JSON file for the predictions.", ("--json",))] = None,
) -> None:
    """Predict measured levels and print errors, interval coverage and half-width by slice.

    Without calibration or profile: by the shipped profile of the table's engine. Without a table:
    the errors of the shipped profiles themselves.
    """
    from lmi_bench.cli.console import say, terminal, write_json
    from lmi_bench.jobs.validate import validate as run
    from lmi_bench.jobs.validate import validate_shipped

    if settings.sources:
        with terminal() as listener:
            validation = run(settings, listener)
        _print(validation)
        write_json(json_file, validation.to_json(), indent=1)
    else:
        with terminal() as listener:
            shipped = validate_shipped(listener)
        _print_shipped(shipped)
        write_json(json_file, shipped.to_json(), indent=1)
    if json_file is not None:
        say(f"{'predictions' if settings.sources else 'errors'}: {json_file}")


def _print(validation: Validation) -> None:
    from lmi_bench.analysis.fit.validation import accuracies, rates_under
    from lmi_bench.cli.console import note, print_table, warn

    judged, warnings = validation.judged, validation.warnings
    chosen = [row for row in judged if row.calibrated]
    print_table(
        f"Calibrated on {plural(len(chosen), 'line')}",
        [_calibrated_row(row) for row in chosen],
        left=("engine", "model", "machine"),
    )
    found = accuracies(judged)
    if not found:
        note("no measured line is left to judge: every one was calibrated on, or cannot be used")
    print_table(
        "Errors on lines that were not calibrated on, and 80 % intervals",
        [{"slice": entry.slice_name, **_error_row(entry)} for entry in found],
        left=("slice", "figure"),
    )
    for figure, limit_ms in validation.limits:
        print_table(
            "Highest rate of the table under a limit, req/s",
            [
                {
                    "engine": entry.engine,
                    "model": entry.model,
                    "TP": entry.tensor_parallel,
                    "limit": entry.limit,
                    "measured": _rate(entry.measured_per_s),
                    "predicted": _rate(entry.predicted_per_s),
                }
                for entry in rates_under(judged, figure, limit_ms)
            ],
            left=("engine", "model", "limit"),
        )
    for text in warnings[:_SHOWN_WARNINGS]:
        warn(text)
    if len(warnings) > _SHOWN_WARNINGS:
        warn(f"and {len(warnings) - _SHOWN_WARNINGS} more such warnings")


def _print_shipped(shipped: ShippedErrors) -> None:
    from lmi_bench.cli.console import note, print_table, say
    from lmi_bench.jobs.validate import TABLES_VARIABLE

    rows = [
        {
            "profile": table.profile,
            "table": table.file,
            "lines of": entry.slice_name,
            **_error_row(entry),
        }
        for table, entry in shipped.errors
    ]
    print_table(
        "Errors of the shipped profiles, and 80 % intervals",
        rows,
        left=("profile", "table", "lines of", "figure"),
    )
    say(
        "fitted models: the profile was fitted to models of such lines, so their errors say how "
        "well it describes what it has seen; other models: foretold"
    )
    for table in shipped.absent:
        note(
            f"{table.profile}: {table.file} does not ship; name its folder in {TABLES_VARIABLE} to "
            "judge it"
        )


def _error_row(entry: Accuracy) -> dict[str, Any]:
    return {
        "figure": entry.figure,
        "lines": entry.rows,
        "silent": entry.silent or None,
        "median": f"{entry.median:.1%}",
        "p90": f"{entry.p90:.1%}",
        "covered": f"{entry.coverage:.0%}",
        "half-width": f"{entry.half_width:.1%}",
    }


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _calibrated_row(row: Judged) -> dict[str, Any]:
    cell = row.row.cell
    assert cell is not None
    load = f"{cell.rate_per_s:g}/s" if cell.rate_per_s is not None else str(cell.concurrency)
    return {
        "line": row.row.number + 2,
        "engine": row.row.engine,
        "model": cell.setup.shape.name,
        "machine": cell.setup.instance.instance_type,
        "TP": cell.setup.tensor_parallel,
        "in / out": f"{cell.input_tokens} / {cell.output_tokens}",
        "load": load,
    }
