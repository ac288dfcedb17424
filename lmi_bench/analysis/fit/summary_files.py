"""Summaries of other load generators as cells: `vllm bench serve` and AIPerf, one level a file.

Their TPOT has the same formula, (last token - first token) / (output tokens - 1), averaged over
requests: mean_tpot_ms in vLLM's files, inter_token_latency in AIPerf's. Lengths are means. Neither
file says which model set-up and machine it was measured on: the caller gives the `Setup`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_bench.analysis.level.cells import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.units import ms_to_s

_LENGTH_SPREAD = 0.1


def read_summary(path: Path) -> Mapping[str, Any]:
    """The JSON object of a summary file; raises InputError where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InputError(
            f"cannot read {path} as a summary: {exc}; `lmi-bench import` makes runs of other "
            "tools' results, which `calibrate` reads"
        ) from exc
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a summary: it holds no JSON object")
    return content


def model_named_in(content: Mapping[str, Any]) -> str | None:
    """The model that a summary names."""
    for key in ("model_id", "model"):
        if isinstance(content.get(key), str):
            return str(content[key])
    names = _inside(content, "input_config", "endpoint", "model_names") or _inside(
        content, "input_config", "model_names"
    )
    return str(names[0]) if isinstance(names, list) and names else None


def cell_of_summary(path: Path, content: Mapping[str, Any], setup: Setup) -> MeasuredLevel:
    """The level of a summary file. Raises InputError where it is of neither kind."""
    try:
        if "mean_tpot_ms" in content:
            return _vllm_cell(content, setup)
        if "inter_token_latency" in content:
            return _aiperf_cell(content, setup)
    except InputError as exc:
        raise InputError(f"{path}: {exc}") from exc
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InputError(f"{path}: the summary lacks or garbles {exc}") from exc
    raise InputError(
        f"{path} is neither a `vllm bench serve` result (mean_tpot_ms) nor AIPerf's "
        "profile_export (inter_token_latency); `lmi-bench import` makes runs of other tools' "
        "results, which `calibrate` reads"
    )


def _vllm_cell(content: Mapping[str, Any], setup: Setup) -> MeasuredLevel:
    done = int(content["completed"])
    if done < 1:
        raise InputError("the summary is of a level without a completed request")
    rate = float(content.get("request_rate") or math.inf)
    users = content.get("max_concurrency")
    return _cell(
        setup,
        requests=int(content.get("num_prompts") or done),
        input_tokens=content["total_input_tokens"] / done,
        output_tokens=content["total_output_tokens"] / done,
        users=users,
        rate=rate if math.isfinite(rate) else None,
        throughput=float(content["output_throughput"]),
        ttft_ms=float(content["mean_ttft_ms"]),
        tpot_ms=float(content["mean_tpot_ms"]),
    )


def _aiperf_cell(content: Mapping[str, Any], setup: Setup) -> MeasuredLevel:
    # AIPerf's place, and that of its predecessor GenAI-Perf
    loadgen = (
        _inside(content, "input_config", "loadgen")
        or _inside(content, "input_config", "perf_analyzer", "stimulus")
        or {}
    )
    users, rate = loadgen.get("concurrency"), loadgen.get("request_rate")
    if not users and not rate:
        raise InputError("the summary names neither a concurrency nor a request rate")
    return _cell(
        setup,
        requests=round(_average(content, "request_count")),
        input_tokens=_average(content, "input_sequence_length"),
        output_tokens=_average(content, "output_sequence_length"),
        users=users,
        rate=rate,
        throughput=_average(content, "output_token_throughput"),
        ttft_ms=_average(content, "time_to_first_token"),
        tpot_ms=_average(content, "inter_token_latency"),
    )


def _inside(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _average(content: Mapping[str, Any], key: str) -> float:
    value = content[key]
    return float(value["avg"] if isinstance(value, Mapping) else value)


def _cell(
    setup: Setup,
    *,
    requests: int,
    input_tokens: float,
    output_tokens: float,
    users: Any,
    rate: Any,
    throughput: float,
    ttft_ms: float,
    tpot_ms: float,
) -> MeasuredLevel:
    """A level; without users and a rate all requests were sent at once."""
    load = Load(rate_per_s=float(rate)) if rate else Load(int(users or requests))
    return MeasuredLevel(
        setup,
        input_tokens=max(1, round(input_tokens)),
        output_tokens=max(1, round(output_tokens)),
        load=load,
        num_requests=requests,
        throughput_tokens_per_s=throughput,
        ttft_mean_s=ms_to_s(ttft_ms),
        tpot_mean_s=ms_to_s(tpot_ms),
        length_spread=0.0 if load.is_open else _LENGTH_SPREAD,
    )
