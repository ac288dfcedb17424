"""Reads published tables of measured levels (CSV) as cells.

There are three families. Sweeps of an endpoint: model, instance, tp, instance_count, input_tokens,
output_tokens, concurrency, throughput_tokens_per_s, latency_ms_per_token; three requests a user,
90th percentiles, rounded down to whole milliseconds if all of them are whole. Sweeps of an engine:
model, accelerator, tp, dtype, concurrency_or_rate (`c=8`, `rate=2.5/s`), ttft_ms, itl_ms (time per
output token), e2e_ms, engine; means, ten requests a user with lengths that vary by a tenth, or 500
requests at a rate. `dtype` is of the weights, `kv_dtype` of the cache. Tables of InferenceX:
`_inferencex_cell`. A column `fit` with `no` keeps a line out of fits: it is only judged. Other
columns and empty fields are ignored.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Final

from lmi_bench.analysis.model.checkpoint_dtype import dtype_of
from lmi_bench.analysis.model.measured_level import LENGTH_SPREAD, MeasuredLevel
from lmi_bench.analysis.model.setup import ACCEPTANCE, Parallelism, PrefillPool, Setup, Speculation
from lmi_bench.catalog.accelerators import Accelerator, find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.durable import read_text, table_rows
from lmi_bench.core.errors import InputError
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
    rows = table_rows(read_text(path), path)
    if not rows:
        raise InputError(f"{path} has no line below its heading")
    missing = [name for name in _REQUIRED if name not in rows[0]]
    if missing:
        raise InputError(f"{path} has no column {', '.join(missing)}: it is not a table of levels")
    if all(name in rows[0] for name in INFERENCEX):
        found = enumerate(rows)
        return [_table_row(n, row, _inferencex_engine(row), _inferencex_cell) for n, row in found]
    latencies = [_number(row, "latency_ms_per_token") for row in rows]
    known = [value for value in latencies if value is not None]
    whole = bool(known) and all(value == int(value) for value in known)
    engines = [" ".join((row.get("engine") or "").lower().split()) for row in rows]
    read = partial(_cell, whole=whole)
    return [_table_row(n, row, engines[n], read) for n, row in enumerate(rows)]


def _table_row(number: int, row: Row, engine: str, cell_of: Callable[[Row], MeasuredLevel]) -> TableRow:
    try:
        cell = cell_of(row)
    except (InputError, ValueError, KeyError, ArithmeticError) as exc:
        why = f"no {exc}" if isinstance(exc, KeyError) else str(exc)
        return TableRow(number, engine, None, why)
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
        raise InputError(f"the rate is {text!r}: not a number above 0" if text else "neither a concurrency nor a rate")
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


INFERENCEX: Final = ("hardware", "framework", "precision", "decode_tp")
_LEAST_SHARE: Final = 0.8  # of the stated lengths
_MEAN_SHARE: Final = (1 + _LEAST_SHARE) / 2
_REQUESTS_PER_USER: Final = 10
_OVERFILLED: Final = 1.3
_ENGINES: Final = ("sglang", "trt", "vllm", "atom")
_HOST: Final = 8  # devices that NVLink or xGMI joins
_HOSTS: Final[Mapping[str, int]] = {"GB200": 72, "GB300": 72}
_FP8_CACHES: Final = ("B200", "MI300X")
_RACK: Final = re.compile(r"[-_](nvl?72|dgx.*|nb|cw|amd|nv)$")


def _inferencex_engine(row: Row) -> str:
    """The engine below a framework: `dynamo-trt` is `trt`, `mori-sglang` is `sglang`."""
    framework = row["framework"].strip().lower()
    return next((name for name in _ENGINES if name in framework), framework)


def _inferencex_cell(row: Row) -> MeasuredLevel:
    """The level of a line of InferenceX; raises InputError or ValueError where there is none.

    Columns: hardware, framework, image, model, precision, spec_method, disaggregated, a
    prefill_* and a decode_* column each for tp, ep, dp_attention, workers and gpus,
    input_tokens, output_tokens, concurrency, date, output_tokens_per_s_per_gpu, and times such
    as ttft_p50_ms and tpot_p50_ms.

    How it measures (`sample_random_requests` and `run_benchmark_serving` of
    SemiAnalysisAI/InferenceX): a closed loop of ten requests a user with lengths drawn evenly
    from 80 to 100 % of the stated ones (`--random-range-ratio 0.8`), so 90 % in the mean; no
    answer ends earlier (`--ignore-eos`); two warm-up requests a user come before and do not
    count. Output tokens are given for each GPU of the decode pool. Without pools both pools
    describe the same GPUs, and their count may be tp * ep where the ranks are the larger of the
    two, as in SGLang and TensorRT-LLM. With MTP the scripts draft three tokens, one with
    data-parallel attention. SGLang's scripts look for new requests every 10 or, from 16 users
    on, 30 decode steps on B200 (`dsr1_*_b200.sh`) and every 4 on AMD's devices. TensorRT-LLM's
    let prompts of data-parallel attention wait until each group has one, at most 60 steps
    (`attention_dp_config`), and on B200 with FP8 those of 1,024 tokens in and out and 64 to 255
    users until they fill 80 % of a step, at most 40 (`dsr1_*_trt.sh`). Caches are in FP8 but
    for SGLang on others than B200 and MI300X.
    """
    setup, prefill, workers = _copy(row)
    stated = _count(row, "input_tokens"), _count(row, "output_tokens")
    users = _count(row, "concurrency")
    input_tokens, output_tokens = (round(_MEAN_SHARE * tokens) for tokens in stated)
    medians = bool(row.get("tpot_p50_ms"))
    statistic = "p50" if medians else "mean"
    gathers = _gathers(row, setup, stated, users)
    return MeasuredLevel(
        setup,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        load=Load(users),
        num_requests=_REQUESTS_PER_USER * users,
        throughput_tokens_per_s=_throughput(row, stated, workers * setup.devices),
        ttft_mean_s=_plain_seconds(row, f"ttft_{statistic}_ms"),
        tpot_mean_s=_plain_seconds(row, f"tpot_{statistic}_ms"),
        length_spread=(1 - _LEAST_SHARE) / 2 / _MEAN_SHARE,
        lengths_stated=True,
        replicas=workers,
        prefill=prefill,
        poll_steps=_poll_steps(row, setup, users),
        gather_steps=gathers[0],
        gather_prompts=gathers[1],
        measured_day=date.fromisoformat(row["date"]).toordinal() if row.get("date") else None,
        medians=medians,
        max_sequences=_decode_batch(row, users, workers) if prefill else None,
    )


def _poll_steps(row: Row, setup: Setup, users: int) -> int:
    device, b200 = setup.instance.accelerator, 30 if users >= 16 else 10
    if row["framework"].strip().lower() != "sglang":
        return 0
    steps = {"B200": b200 if setup.tensor_parallel == 8 else 10}
    return 4 if device.vendor == "amd" else steps.get(device.name, 0)


def _decode_batch(row: Row, users: int, workers: int) -> int | None:
    """The largest decode batch of one of TensorRT-LLM's workers in a pool; None: not known.

    No column states it. Recipes compile for a power of two and send a little more than fills it.
    """
    share = users / workers
    limit = 1 << int(math.log2(max(1.0, share)))
    return limit if _inferencex_engine(row) == "trt" and 1 < share / limit < _OVERFILLED else None


def _gathers(row: Row, setup: Setup, stated: tuple[int, int], users: int) -> tuple[int, int]:
    """Most steps and number of prompts for which TensorRT-LLM's prompts wait, without pools."""
    device, groups = setup.instance.accelerator.name, setup.parallelism.attention_groups
    if _inferencex_engine(row) != "trt" or _flag(row, "disaggregated"):
        return 0, 1
    if groups > 1:
        return 60, groups
    delays = setup.speculation is None and stated == (1024, 1024) and 64 <= users < 256
    if delays and (device, setup.dtype) == ("B200", "float8"):
        return 40, math.ceil(0.8 * 8192 / (_MEAN_SHARE * stated[0]))
    return 0, 1


def _copy(row: Row) -> tuple[Setup, PrefillPool | None, int]:
    """A copy, its prefill workers and the number of decode workers, each with its devices."""
    if not _flag(row, "disaggregated"):
        ranks = max(_count(row, "decode_tp"), int(row["decode_ep"] or 1))
        return _setup(row, "decode", ranks), None, 1
    counts = [int(row[f"{pool}_workers"] or 0) for pool in ("prefill", "decode")]
    if not all(counts):
        raise InputError("the workers of its pools are not stated")
    prefill, decode = (
        _setup(row, pool, int(row[f"{pool}_gpus"]) // count)
        for pool, count in zip(("prefill", "decode"), counts, strict=True)
    )
    return decode, PrefillPool(replace(prefill, speculation=None), counts[0]), counts[1]


def _setup(row: Row, pool: str, ranks: int) -> Setup:
    """One copy of a pool (`prefill` or `decode`) over so many devices."""
    device, shape = _device(row), find_model(row["model"])
    spreads_attention = _flag(row, f"{pool}_dp_attention")
    a_host = _HOSTS.get(device.name, _HOST)
    return Setup(
        shape,
        bare_machine(device, min(ranks, a_host)),
        ranks,
        _precision(row["precision"], device),
        kv_dtype="float8" if _inferencex_engine(row) == "trt" or device.name in _FP8_CACHES else None,
        speculation=_speculation(row, spreads_attention),
        parallelism=Parallelism(
            expert_parallel=int(row[f"{pool}_ep"] or 1) > 1,
            attention_groups=ranks if spreads_attention else 1,
            hosts=-(-ranks // a_host),
        ),
    )


def _speculation(row: Row, spreads_attention: bool) -> Speculation | None:
    """Tokens that the model's own layer drafts, by the benchmark's scripts; acceptance: a prior."""
    method = (row.get("spec_method") or "none").strip().lower()
    if method in ("none", ""):
        return None
    if method != "mtp":
        raise InputError(f"speculation by {method} is not known")
    return Speculation(1 if spreads_attention else 3, ACCEPTANCE, own=True)


def _flag(row: Row, key: str) -> bool:
    return (row.get(key) or "").strip().lower() in ("true", "1", "yes")


def _device(row: Row) -> Accelerator:
    """`h100`, or with its rack or provider: `gb200-nvl72`, `h200-cw`."""
    name = _RACK.sub("", row["hardware"].strip().lower())
    return find_accelerator("h100-sxm" if name == "h100" else name)


def _precision(precision: str, device: Accelerator) -> str:
    """The number format of a precision: FP4 is NVFP4 on NVIDIA's devices, MXFP4 on others."""
    word = precision.strip().lower()
    if word in ("fp4", "nvfp4", "mxfp4"):
        return "nvfp4" if device.vendor == "nvidia" else "mxfp4"
    return dtype_of("inferencex", word) or word


def _plain_number(row: Row, key: str) -> float | None:
    text = (row.get(key) or "").strip()
    return float(text) if text else None


def _plain_seconds(row: Row, key: str) -> float | None:
    value = _plain_number(row, key)
    return None if value is None else ms_to_s(value)


def _throughput(row: Row, stated: tuple[int, int], ranks: int) -> float | None:
    """Output tokens each second of the whole set-up, from the figure of one GPU."""
    output = _plain_number(row, "output_tokens_per_s_per_gpu")
    if output is None and (both := _plain_number(row, "tokens_per_s_per_gpu")) is not None:
        output = both * stated[1] / sum(stated)
    return None if output is None else output * ranks
