"""`lmi-bench predict`: throughput and latency of a machine that is not rented yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.core.units import format_interval
from lmi_bench.jobs.settings.predict import PredictSettings

if TYPE_CHECKING:
    from lmi_bench.analysis.fit.forecast import Forecast, SimulatedForecast
    from lmi_bench.analysis.fit.uncertainty import Estimate
    from lmi_bench.jobs.predict import Prediction


@spread_options
def predict(
    settings: PredictSettings,
    json_file: Annotated[Path | None, Option("File for the predictions.", ("--json",))] = None,
) -> None:
    """Predict throughput and latency with 80 % intervals, and what binds.

    Beyond 80 % of the predicted capacity an open loop gets its capacity and no latency.
    Unequal requests, traces and routers are simulated over the engine's own scheduler.
    """
    from lmi_bench.cli.console import say, terminal, write_json
    from lmi_bench.jobs.predict import predict as run

    with terminal() as listener:
        prediction = run(settings, listener)
    write_json(json_file, prediction.to_json(), indent=1)
    _print(prediction)
    if json_file is not None:
        say(f"predictions: {json_file}")


def _print(prediction: Prediction) -> None:
    from lmi_bench.cli.console import print_table, say, warn

    settings, speculation = prediction.settings, prediction.speculation
    copies = "" if settings.replicas == 1 else f", {settings.replicas} copies"
    cache = "" if settings.kv_dtype is None else f", {settings.kv_dtype} cache"
    title = f"{settings.input_tokens} in / {settings.output_tokens} out"
    if settings.is_simulated:
        title = "simulated over the engine's scheduler"
    say(
        f"{prediction.shape.name}, {prediction.dtype}{cache}, on "
        f"{prediction.machine.instance_type}, TP {settings.tensor_parallel}{copies}, {title}"
    )
    if speculation is not None:
        say(
            f"speculation: {speculation.draft_tokens} tokens guessed a step, each holds with "
            f"{speculation.acceptance:.2f}: {speculation.tokens_per_step:.2f} tokens a step"
        )
    say(prediction.profile.provenance)
    rows = [_row(each) for each in prediction.forecasts]
    rows += [_simulated_row(each) for each in prediction.simulated]
    print_table("Predictions with 80 % intervals", rows, left=("binds",))
    for text in dict.fromkeys(_explanations(prediction)):
        say(text)
    for text in prediction.warnings:
        warn(text)


def _explanations(prediction: Prediction) -> Iterator[str]:
    from lmi_bench.analysis.fit.forecast import CAUSES

    for each in prediction.forecasts:
        yield f"{each.regime}: {CAUSES[each.regime]}"
    for one in prediction.simulated:
        if one.errors:
            yield f"{one.errors} of {one.requests} requests at load {one.load} do not fit"
    silences = [each.withheld for each in prediction.forecasts]
    for reason in (*silences, *(one.withheld for one in prediction.simulated)):
        if reason:
            yield f"no latency where {reason}"


def _row(each: Forecast) -> dict[str, Any]:
    cell = each.cell
    load = str(cell.concurrency) if cell.rate_per_s is None else f"{cell.rate_per_s:g}/s"
    return {
        "load": load,
        "tok/s": _interval(each.figures["throughput_tokens_per_s"]),
        "ms/token": _interval(each.figures["latency_ms_per_token"]),
        "TPOT ms": _interval(each.figures["tpot_ms"]),
        "TTFT ms": _interval(each.figures["ttft_ms"]),
        "capacity tok/s": _interval(each.capacity_tokens_per_s),
        "binds": each.regime,
    }


def _simulated_row(each: SimulatedForecast) -> dict[str, Any]:
    figures = each.figures
    return {
        "load": each.load,
        "tok/s": _interval(figures["throughput_tokens_per_s"]),
        "ms/token": _interval(figures["latency_ms_per_token"]),
        "TPOT ms": _interval(figures["tpot_ms"]),
        "TTFT ms": _interval(figures["ttft_ms"]),
        "TTFT p90 ms": _interval(
            figures["ttft_p90_ms"], absent="withheld" if each.withheld else "too few requests"
        ),
        "capacity tok/s": _interval(each.capacity_tokens_per_s),
    }


def _interval(figure: Estimate | None, *, absent: str = "withheld") -> str:
    if figure is None:
        return absent
    return format_interval(figure.value, figure.low, figure.high)
