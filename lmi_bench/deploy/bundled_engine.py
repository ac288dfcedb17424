"""Translates serving.properties into settings of the bundled engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lmi_bench.core.durable import parsed_json
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.option_table import Option, Setting, all_options
from lmi_bench.engine.quantization import LMI_NAMES
from lmi_bench.models.folder import KINDS

_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ASYNC_ERA: Final = "C"
_ON_SINCE_V1: Final = ("chunked_prefill", "prefix_caching")
"""What the vLLM of such containers does unless told otherwise."""
_AUTO_BATCH: Final = 32  # of rolling_batch=auto, whatever the documentation says
_COMPILED_BATCHES: Final = ("trtllm", "tnx", "neuron")
_ON_OFF: Final = {True: "on", False: "off"}
_FORMATTERS: Final = {"jsonlines": True, "json": False}
"""Whether a formatter that a file names streams; an unnamed one leaves it to the request."""


@dataclass(frozen=True, slots=True)
class BundledSettings:
    """Settings for `serve`.

    engine             fields of the scenario's engine section
    model              None: the weights are beside the file
    loading_timeout_s  None: no limit
    ignored            keys without effect here
    batching           description of the chosen batching, for display
    lmi_replies        form of the container's answers: rolling, batched, async or tgi
    lmi_streams        whether it streams, whatever a request says; None: as the request says
    notes              what the engine does otherwise than the file asks
    """

    model: str | None
    engine: Mapping[str, Any]
    loading_timeout_s: int | None
    ignored: tuple[str, ...]
    batching: str
    lmi_replies: str = "rolling"
    lmi_streams: bool | None = None
    notes: tuple[str, ...] = ()


def bundled_settings(settings: Mapping[str, Setting], *, simulated: bool = False, era: str = "A") -> BundledSettings:
    """Translate effective settings whose names and kinds have been checked.

    simulated  True: keep fp16. The bundled engine uses bfloat16 instead (the same size; CPUs have
               no half-precision arithmetic)
    era        of the container; what it does without being asked is done here too

    Raises InputError for quantization and RoPE scaling that it would not apply.
    """
    values = {name: setting.value for name, setting in settings.items()}
    engine: dict[str, Any] = _quantization(settings) | _rope_scaling(values)
    options = all_options()
    for name, option in options.items():
        if name in values and option.engine_setting.strip("*"):
            engine[option.engine_setting] = _converted(option, values[name])
    batching, policy = _batching(values)
    engine |= policy
    if values.get("option.rolling_batch", "").lower() == "deepspeed" and not simulated:
        engine["follow_memory"] = True  # as DeepSpeed's own batches do
    compiles = () if simulated else _compile_notes(values)
    engine |= {"compile": True} if compiles else {}
    rolls = policy["policy"] == "rolling"
    is_async = era == _ASYNC_ERA and rolls
    if is_async:
        engine = dict.fromkeys(_ON_SINCE_V1, True) | engine
        states = [f"{name.replace('_', ' ')} {_ON_OFF[engine[name]]}" for name in _ON_SINCE_V1]
        batching = f"rolling, as vLLM in async mode: {', '.join(states)}"
        if values.get("option.rolling_batch", "auto").lower() == "auto":
            engine.setdefault("max_rolling_batch_size", _AUTO_BATCH)
    stated = values.get("option.dtype", "auto").lower()
    dtype = _DTYPES.get(stated, stated)
    if dtype in _DTYPES.values():
        engine["dtype"] = "bfloat16" if dtype == "float16" and not simulated else dtype
    if (paged := values.get("option.paged_attention")) is not None:
        engine["kv_layout"] = "paged" if paged.lower() == "true" else "contiguous"
    if "option.speculative_config" in values:
        engine |= _speculation(values["option.speculative_config"])
    if "job_queue_size" in values:
        running = int(engine.get("max_rolling_batch_size") or engine.get("batch_size") or 32)
        engine["max_concurrent_requests"] = int(values["job_queue_size"]) + running
    timeout = values.get("option.model_loading_timeout")
    formatter = values.get("option.output_formatter", "") if rolls and not is_async else ""
    streams = _FORMATTERS.get(formatter)
    as_tgi = era == "B" and values.get("option.tgi_compat", "false").lower() == "true"
    replies = "batched" if not rolls else "tgi" if as_tgi else "async" if is_async else "rolling"
    used = {"option.output_formatter": streams is not None}
    used["option.hf_overrides"] = "rope_scaling" in engine
    known = {name for name, option in options.items() if option.engine_setting or used.get(name)}
    return BundledSettings(
        model=values.get("option.model_id"),
        engine=engine,
        loading_timeout_s=None if timeout is None else int(timeout),
        ignored=tuple(name for name in values if name not in known),
        batching=batching,
        lmi_replies=replies,
        lmi_streams=streams,
        notes=_notes(settings) + compiles,
    )


def _notes(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    name = "option.trust_remote_code"
    if name not in settings or settings[name].value.lower() != "true":
        return ()
    refusal = "a model that needs its own is refused when it is loaded"
    return (f"{_where(settings, name)}: no code of the model is run here; {refusal}",)


def _compile_notes(values: Mapping[str, str]) -> tuple[str, ...]:
    """A note if the file names a back end that serves compiled steps alone; else none."""
    options, rolling = all_options(), values.get("option.rolling_batch", "").lower()
    asking = [name for name in values if name in options and options[name].backends == ("tnx",)]
    if rolling in _COMPILED_BATCHES:
        asking.insert(0, f"option.rolling_batch={rolling}")
    early = "`lmi-bench compile` does it ahead of time, and --artefact FOLDER loads it"
    said = f"decode steps are compiled at start for fixed shapes; {early}"
    return tuple(f"{name}: {said}" for name in asking[:1])


def _quantization(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The quantization that the file names; InputError if the engine does not have it."""
    for name in ("option.quantize", "option.quantization", "option.load_in_8bit"):
        asked = settings[name].value.lower() if name in settings else "false"
        if asked in LMI_NAMES:
            return {"quantize": LMI_NAMES[asked].value}
        if asked != "false":
            raise InputError(
                f"{_where(settings, name)}: the bundled engine has {', '.join(LMI_NAMES)}, and "
                "results without the file's quantization would mislead; remove the line, or "
                "choose with --quantize"
            )
    return {}


def _rope_scaling(values: Mapping[str, str]) -> dict[str, Any]:
    """The scaling that TensorRT-LLM's two options, or the others' JSON, name."""
    if "option.rotary_scaling_type" in values:
        kind, factor = (values[f"option.rotary_scaling_{part}"] for part in ("type", "factor"))
        return {"rope_scaling": f"{kind.lower()}:{factor}"}
    replaced = parsed_json(values.get("option.hf_overrides", "{}"))
    stated = parsed_json(values.get("option.rope_scaling", "null"))
    if isinstance(replaced, dict):
        stated = stated or replaced.get("rope_scaling") or replaced.get("rope_parameters")
    if not stated:
        return {}
    keys = stated if isinstance(stated, dict) else {}
    named = keys.get("rope_type") or keys.get("type")
    if named not in KINDS or "factor" not in keys:
        raise InputError(
            f"RoPE scaling {json.dumps(stated)}: the bundled engine has {', '.join(KINDS)}, each "
            'with a factor, as in {"type": "linear", "factor": 2}'
        )
    return {"rope_scaling": f"{named}:{keys['factor']}"}


def _batching(values: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The policy: a batch_size above 1 or a disabled rolling batch means dynamic batching."""
    rolling = values.get("option.rolling_batch", "auto").lower()
    size = int(values.get("batch_size", "1"))
    if size > 1 or rolling == "disable":
        if values.get("option.async_mode", "false").lower() == "true":
            return "async mode: a rolling batch", {"policy": "rolling"}
        if size > 1:
            return f"dynamic batches of up to {size}", {"policy": "dynamic", "batch_size": size}
        return "one request at a time", {"policy": "none"}
    name = "rolling batch" if rolling == "auto" else f"{rolling}'s rolling batch"
    return f"{name}: rolling, prefill pauses decoding unless chunked", {"policy": "rolling"}


def _speculation(text: str) -> dict[str, Any]:
    try:
        content = {**parsed_json(text)}
    except (ValueError, TypeError) as exc:
        raise InputError(f"option.speculative_config is not JSON: {exc}") from exc
    draft = "ngram" if content.get("method") == "ngram" else content.get("model")
    if draft is None:
        raise InputError("option.speculative_config names neither a model nor the method ngram")
    found: dict[str, Any] = {"draft": draft}
    if "num_speculative_tokens" in content:
        found["draft_tokens"] = content["num_speculative_tokens"]
    return found


def _converted(option: Option, value: str) -> Any:
    match option.kind:
        case "bool":
            return value.lower() == "true"
        case "float":
            return float(value)
        case "int" | "count":
            if not value.removeprefix("-").isdecimal():
                raise InputError(f"{option.name}={value}: write it as digits for this engine")
            return int(value)
        case "int_or_max":
            return value if value == "max" else int(value)
    return value


def _where(settings: Mapping[str, Setting], name: str) -> str:
    setting = settings[name]
    return f"{setting.origin}: {name}={setting.value}"
