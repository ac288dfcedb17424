"""One prediction: from the flags to a table and a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.cells import Cell
from lmi_bench.analysis.fit import Estimate, prior_fit
from lmi_bench.analysis.forecast import CAUSES, Forecast, forecast
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import print_table, say, warn
from lmi_bench.cli.profile_files import find_profile
from lmi_bench.errors import InputError

_REQUESTS_PER_USER = 10
_LENGTH_SPREAD = 0.1  # real answers end at different lengths, which breaks up their queues
_OPEN_LOOP_S = 120.0
_MOST_REQUESTS, _LEAST_REQUESTS = 2000, 200


@dataclass(frozen=True, slots=True)
class Question:
    """The command's flags."""

    model: str
    instance: str
    tensor_parallel: int
    replicas: int
    dtype: str
    input_tokens: int
    output_tokens: int
    concurrencies: str | None
    rates: str | None
    profile: str | None


def run(question: Question, *, json_file: Path | None) -> None:
    """Predict, print, save. Raises InputError for what cannot be asked or cannot run."""
    profile = find_profile(question.profile)
    spread = _LENGTH_SPREAD if profile.chunked_prefill else 0.0
    cells = [replace(cell, length_spread=spread) for cell in _cells(question)]
    fit = prior_fit(profile, cells)
    forecasts = [forecast(fit, cell) for cell in cells]
    first = cells[0]
    warnings = [
        *profile.warnings_for(accelerator=first.instance.accelerator.name),
        *profile.notes,
    ]
    if json_file is not None:
        content = {
            "model": first.shape.name,
            "instance": first.instance.instance_type,
            "tensor_parallel": first.tensor_parallel,
            "replicas": first.replicas,
            "dtype": first.dtype,
            "input_tokens": first.input_tokens,
            "output_tokens": first.output_tokens,
            "profile": profile.provenance,
            "interval": "80 %",
            "warnings": warnings,
            "predictions": [each.to_json() for each in forecasts],
        }
        _save(json_file, content)
    say(
        f"{first.shape.name}, {first.dtype}, on {first.instance.instance_type}, TP "
        f"{first.tensor_parallel}, {first.input_tokens} in / {first.output_tokens} out"
    )
    say(profile.provenance)
    print_table(
        "Predictions with 80 % intervals", [_row(each) for each in forecasts], left=("cause",)
    )
    for text in dict.fromkeys(each.withheld for each in forecasts if each.withheld):
        say(f"no latency where {text}")
    for text in warnings:
        warn(text)
    if json_file is not None:
        say(f"predictions: {json_file}")


def _cells(question: Question) -> Iterator[Cell]:
    if (question.concurrencies is None) == (question.rates is None):
        raise InputError("give either --concurrency or --rate: the load to predict for")
    for name, value in (
        ("--input-tokens", question.input_tokens),
        ("--output-tokens", question.output_tokens),
        ("--tp", question.tensor_parallel),
    ):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    common: dict[str, Any] = {
        "shape": find_model(question.model),
        "instance": find_instance(question.instance),
        "tensor_parallel": question.tensor_parallel,
        "dtype": question.dtype,
        "input_tokens": question.input_tokens,
        "output_tokens": question.output_tokens,
        "replicas": question.replicas,
    }
    if question.concurrencies is not None:
        for users in _numbers("--concurrency", question.concurrencies):
            if users != int(users):
                raise InputError(f"--concurrency takes whole numbers, got {users:g}")
            yield Cell(
                **common, concurrency=int(users), num_requests=_REQUESTS_PER_USER * int(users)
            )
    for rate in _numbers("--rate", question.rates or ""):
        requests = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, math.ceil(rate * _OPEN_LOOP_S)))
        yield Cell(**common, concurrency=0, rate_per_s=rate, num_requests=requests)


def _numbers(flag: str, text: str) -> Iterator[float]:
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            value = float(part)
        except ValueError:
            raise InputError(f"{flag} {text!r}: {part!r} is not a number") from None
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{flag} must be above 0, got {part}")
        yield value


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
        "cause": f"{each.regime}: {CAUSES[each.regime]}",
    }


def _interval(figure: Estimate | None) -> str:
    if figure is None:
        return "withheld"
    return f"{figure.value:,.4g} [{figure.low:,.4g} to {figure.high:,.4g}]"


def _save(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        raise InputError(f"cannot write {path}: {exc.strerror}") from exc
