"""Reads tables of the public InferenceX benchmark (CSV) as cells.

Columns: hardware, framework, image, model, precision, spec_method, disaggregated, a prefill_* and a
decode_* column each for tp, ep, dp_attention, workers and gpus, input_tokens, output_tokens,
concurrency, date, output_tokens_per_s_per_gpu, and times such as ttft_p50_ms and tpot_p50_ms.

How it measures (`sample_random_requests` and `run_benchmark_serving` of SemiAnalysisAI/InferenceX):
a closed loop of ten requests a user with lengths drawn evenly from 80 to 100 % of the stated ones
(`--random-range-ratio 0.8`), so 90 % in the mean; no answer ends earlier (`--ignore-eos`); two
warm-up requests a user come before and do not count. Output tokens are given for each GPU of the
decode pool. Without pools both pools describe the same GPUs, and their count may be tp * ep where
the ranks are the larger of the two, as in SGLang and TensorRT-LLM. With MTP the scripts draft three
tokens, one with data-parallel attention. SGLang's scripts look
for new requests every 10 or, from 16 users on, 30 decode steps on B200 (`dsr1_*_b200.sh`) and every
4 on AMD's devices. TensorRT-LLM's let prompts of data-parallel attention wait until each group has
one, at most 60 steps (`attention_dp_config`), and on B200 with FP8 those of 1,024 tokens in and out
and 64 to 255 users until they fill 80 % of a step, at most 40 (`dsr1_*_trt.sh`). Caches are in FP8
but for SGLang on others than B200 and MI300X.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Final

from lmi_bench.analysis.model.checkpoint_dtype import dtype_of
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import ACCEPTANCE, Parallelism, PrefillPool, Setup, Speculation
from lmi_bench.catalog.accelerators import Accelerator, find_accelerator
from lmi_bench.catalog.instances import bare_machine
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.units import ms_to_s

Row = Mapping[str, str]

COLUMNS: Final = ("hardware", "framework", "precision", "decode_tp")
_LEAST_SHARE: Final = 0.8  # of the stated lengths
_MEAN_SHARE: Final = (1 + _LEAST_SHARE) / 2
_REQUESTS_PER_USER: Final = 10
_OVERFILLED: Final = 1.3
_ENGINES: Final = (("sglang", "sglang"), ("trt", "trt"), ("vllm", "vllm"), ("atom", "atom"))
_HOST: Final = 8  # devices that NVLink or xGMI joins
_HOSTS: Final[Mapping[str, int]] = {"GB200": 72, "GB300": 72}
_FP8_CACHES: Final = ("B200", "MI300X")
_RACK: Final = re.compile(r"[-_](nvl?72|dgx.*|nb|cw|amd|nv)$")


def engine_of(row: Row) -> str:
    """The engine below a framework: `dynamo-trt` is `trt`, `mori-sglang` is `sglang`."""
    framework = row["framework"].strip().lower()
    return next((name for part, name in _ENGINES if part in framework), framework)


def cell_of(row: Row) -> MeasuredLevel:
    """The level of a line; raises InputError or ValueError where it cannot be represented."""
    setup, prefill, workers = _copy(row)
    stated = int(row["input_tokens"]), int(row["output_tokens"])
    users = int(row["concurrency"])
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
        ttft_mean_s=_seconds(row, f"ttft_{statistic}_ms"),
        tpot_mean_s=_seconds(row, f"tpot_{statistic}_ms"),
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
    return limit if engine_of(row) == "trt" and 1 < share / limit < _OVERFILLED else None


def _gathers(row: Row, setup: Setup, stated: tuple[int, int], users: int) -> tuple[int, int]:
    """Most steps and number of prompts for which TensorRT-LLM's prompts wait, without pools."""
    device, groups = setup.instance.accelerator.name, setup.parallelism.attention_groups
    if engine_of(row) != "trt" or _flag(row, "disaggregated"):
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
        ranks = max(int(row["decode_tp"]), int(row["decode_ep"] or 1))
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
        _dtype(row["precision"], device),
        kv_dtype="float8" if engine_of(row) == "trt" or device.name in _FP8_CACHES else None,
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


def _dtype(precision: str, device: Accelerator) -> str:
    """The number format of a precision: FP4 is NVFP4 on NVIDIA's devices, MXFP4 on others."""
    word = precision.strip().lower()
    if word in ("fp4", "nvfp4", "mxfp4"):
        return "nvfp4" if device.vendor == "nvidia" else "mxfp4"
    return dtype_of("inferencex", word) or word


def _number(row: Row, key: str) -> float | None:
    text = (row.get(key) or "").strip()
    return float(text) if text else None


def _seconds(row: Row, key: str) -> float | None:
    value = _number(row, key)
    return None if value is None else ms_to_s(value)


def _throughput(row: Row, stated: tuple[int, int], ranks: int) -> float | None:
    """Output tokens each second of the whole set-up, from the figure of one GPU."""
    output = _number(row, "output_tokens_per_s_per_gpu")
    if output is None and (both := _number(row, "tokens_per_s_per_gpu")) is not None:
        output = both * stated[1] / sum(stated)
    return None if output is None else output * ranks
