"""Reads published tables of measured levels (CSV) as cells.

There are three families. Sweeps of an endpoint: model, instance, tp, instance_count, input_tokens,
output_tokens, concurrency, throughput_tokens_per_s, latency_ms_per_token; three requests a user,
90th percentiles, rounded down to whole milliseconds if all of them are whole. Sweeps of an engine:
model, accelerator, tp, dtype, concurrency_or_rate (`c=8`, `rate=2.5/s`), ttft_ms, itl_ms (time per
output token), e2e_ms, engine; means, ten requests a user with lengths that vary by a tenth, or 500
requests at a rate. `dtype` is of the weights, `kv_dtype` of the cache. Tables of InferenceX:
`inferencex_tables`. A column `fit` with `no` keeps a line out of fits: it is only judged. Other
columns and empty fields are ignored.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lmi_bench.analysis.fit import inferencex_tables
from lmi_bench.analysis.model.checkpoint_dtype import dtype_of
from lmi_bench.analysis.model.measured_level import LENGTH_SPREAD, MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import Accelerator, find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.core.load import Load
from lmi_bench.core.units import ms_to_s

Row = Mapping[str, str]

_REQUESTS_PER_USER_ENDPOINT = 3
_REQUESTS_PER_USER_ENGINE = 10
_OPEN_LOOP_REQUESTS = 500
_WHOLE_MS = 1e-3
_NOT_WHOLE = 1e-6
_USUAL_COUNTS = (50, 100, 200, 300, 500, 1000, 2000, 5000, 10000)
_FORM_FACTOR = re.compile(r"[-_ ]*(sxm\d?|pcie|nvl|hbm\w*|nvidia|tensor core)\b", re.IGNORECASE)
_MEMORY = re.compile(r"[-_ ]*(\d+) ?gi?b\b", re.IGNORECASE)
_RATE_UNIT = re.compile(r" *(/s|req(uests?)?(/s| per second)|rps|qps)$")
_EMPTY = ("", "-", "n/a", "na", "nan", "none", "null", "?")
_REQUIRED = ("model", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of a table.

    engine   its name in the table, in lower case; empty where the table names none
    cell     None where the line cannot be used; `problem` says why
    fits     whether a fit may use it
    """

    number: int
    engine: str
    cell: MeasuredLevel | None
    problem: str | None = None
    e2e_mean_s: float | None = None
    e2e_p99_s: float | None = None
    fits: bool = True


def read_table(path: Path) -> list[TableRow]:
    """Every line of a table, in order. Raises InputError where the file is not such a table."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise InputError(f"cannot read {path}: {file_reason(exc)}") from exc
    if not rows:
        raise InputError(f"{path} has no line below its heading")
    missing = [name for name in _REQUIRED if name not in rows[0]]
    if missing:
        raise InputError(f"{path} has no column {', '.join(missing)}: it is not a table of levels")
    if all(name in rows[0] for name in inferencex_tables.COLUMNS):
        engine_of, cell_of = inferencex_tables.engine_of, inferencex_tables.cell_of
        return [_table_row(number, row, engine_of(row), cell_of) for number, row in enumerate(rows)]
    latencies = [_number(row, "latency_ms_per_token") for row in rows]
    known = [value for value in latencies if value is not None]
    whole = bool(known) and all(value == int(value) for value in known)
    engines = [" ".join((row.get("engine") or "").lower().split()) for row in rows]
    read = partial(_cell, whole=whole)
    return [_table_row(n, row, engines[n], read) for n, row in enumerate(rows)]


def _table_row(
    number: int, row: Row, engine: str, cell_of: Callable[[Row], MeasuredLevel]
) -> TableRow:
    try:
        cell = cell_of(row)
    except (InputError, ValueError) as exc:
        return TableRow(number, engine, None, str(exc))
    return TableRow(
        number,
        engine,
        cell,
        e2e_mean_s=_seconds(row, "e2e_ms"),
        e2e_p99_s=_seconds(row, "e2e_p99_ms"),
        fits=(row.get("fit") or "").strip().lower() != "no",
    )


def _number(row: Row, key: str) -> float | None:
    text = (row.get(key) or "").strip().replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _count(row: Row, key: str, default: int | None = None) -> int:
    """A whole number of at least 1; raises InputError where the field holds something else."""
    text = (row.get(key) or "").strip()
    if text.lower() in _EMPTY:
        if default is None:
            raise InputError(f"no {key}")
        return default
    value = _number(row, key)
    if value is None or round(value) < 1 or abs(value - round(value)) > _NOT_WHOLE:
        raise InputError(f"{key} is {text!r}: not a whole number of at least 1")
    return round(value)


def _seconds(row: Row, key: str) -> float | None:
    value = _number(row, key)
    return None if value is None else ms_to_s(value)


def _load(row: Row) -> Load:
    if (row.get("concurrency") or "").strip().lower() not in _EMPTY:
        return Load(_count(row, "concurrency"))
    text = (row.get("concurrency_or_rate") or "").strip().lower()
    kind, _, value = text.rpartition("=")
    number = _RATE_UNIT.sub("", value.strip())
    is_rate = kind.strip() in ("rate", "r", "qps", "rps") or number != value.strip()
    if text and not is_rate:
        return Load(_count({"concurrency": number}, "concurrency"))
    text = number if text else (row.get("rate_per_s") or "").strip().lower()
    if text in ("inf", "infinity"):  # all requests at once, a user each
        return Load(_count(row, "num_requests", _OPEN_LOOP_REQUESTS))
    rate = _number({"rate": text}, "rate")
    if rate is None:
        raise InputError(
            f"the rate is {text!r}: not a number above 0"
            if text
            else "neither a concurrency nor a rate"
        )
    return Load(rate_per_s=rate)


def _accelerator(name: str) -> Accelerator:
    """The accelerator of a name with additions: `H200-SXM`, `NVIDIA A100 40GB`.

    An A100 without a memory size is the one with 80 GB.
    """
    memory = _MEMORY.search(name)
    bare = " ".join(_FORM_FACTOR.sub("", _MEMORY.sub("", name)).split()).strip(" -_")
    sized = "" if memory is None else f"{bare}-{memory.group(1)}"
    for word in (name, sized, bare, f"{bare}-80"):
        try:
            return find_accelerator(word)
        except InputError:
            continue
    return find_accelerator(name)


def _dtype(text: str) -> str:
    """The number format that a table's word means; FP16 where it has none."""
    word = text.strip().lower()
    return dtype_of("table", word) or word or "float16"


def _cell(row: Row, whole: bool) -> MeasuredLevel:
    degree = _count(row, "tp", _count(row, "n_accelerators", 1))
    load = _load(row)
    output_tokens = _count(row, "output_tokens")
    throughput = _number(row, "throughput_tokens_per_s")
    shape, machine = find_model(row["model"]), (row.get("instance") or "").strip()
    by_engine = not machine
    if machine:
        instance = find_instance(machine)
    else:  # one built from the accelerators that the line names; n_accelerators 0: not known
        count = max(degree, round(_number(row, "n_accelerators") or 0))
        instance = bare_machine(_accelerator((row.get("accelerator") or "").strip()), count)
    per_user = _REQUESTS_PER_USER_ENGINE if by_engine else _REQUESTS_PER_USER_ENDPOINT
    by_latency = (row.get("throughput_is") or "").startswith("derived")
    requests = _OPEN_LOOP_REQUESTS
    if load.concurrency is not None:
        requests = per_user * load.concurrency
        if throughput and (e2e_s := _seconds(row, "e2e_ms")):
            in_flight = throughput * e2e_s / output_tokens
            by_latency = abs(in_flight / load.concurrency - 1) < 0.01
    return MeasuredLevel(
        Setup(
            shape,
            instance,
            degree,
            _dtype(row.get("dtype") or ""),
            kv_dtype=_dtype(row["kv_dtype"]) if row.get("kv_dtype") else None,
        ),
        input_tokens=_count(row, "input_tokens"),
        output_tokens=output_tokens,
        load=load,
        num_requests=_count(row, "num_requests", requests),
        replicas=_count(row, "instance_count", 1),
        throughput_tokens_per_s=throughput,
        latency_p90_s_per_token=_seconds(row, "latency_ms_per_token"),
        ttft_mean_s=_seconds(row, "ttft_ms"),
        tpot_mean_s=_seconds(row, "itl_ms"),
        latency_rounded_down_s=_WHOLE_MS if whole else 0.0,
        length_spread=LENGTH_SPREAD if by_engine and not load.is_open else 0.0,
        throughput_by_latency=by_latency,
    )


def requests_of_open_loop(rows: Sequence[TableRow]) -> int | None:
    """Number of requests of a level at a rate, estimated from its throughput; None if unknown.

    n requests at rate r take n / r and the time of the last answer: n * output / throughput. The
    estimate is the minimum over the rows, since answers that end late only increase it.
    """
    found = []
    for row in rows:
        cell = row.cell
        if cell is None or cell.rate_per_s is None or not cell.throughput_tokens_per_s:
            continue
        overloaded = cell.rate_per_s * cell.output_tokens > 1.5 * cell.throughput_tokens_per_s
        last_s = row.e2e_p99_s if overloaded else row.e2e_mean_s
        beyond_s = cell.output_tokens / cell.throughput_tokens_per_s - 1 / cell.rate_per_s
        if last_s and beyond_s > 0:
            found.append(last_s / beyond_s)
    if not found:
        return None
    least = min(found)
    return min(_USUAL_COUNTS, key=lambda count: abs(math.log(count / least)))


def with_requests(row: TableRow, count: int) -> TableRow:
    """The row with that number of requests in its open loop."""
    if row.cell is None or row.cell.rate_per_s is None:
        return row
    return replace(row, cell=replace(row.cell, num_requests=count))
