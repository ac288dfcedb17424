"""Options that a target would leave without effect: refused, since silence passes for obedience.

Only flags are looked at. A scenario file may hold settings for several kinds of target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import SAGEMAKER_PREFIX, SIMULATED_PREFIX, is_endpoint

_OF_ENDPOINTS = {
    "protocol": "--protocol",
    "stream": "--no-stream",
    "client.timestamps": "--timestamps",
    "client.receive": "--receive",
    "client.first_token_timeout_s": "--first-token-timeout",
    "client.retries": "--retries",
    "client.connections": "--connections",
}
_OF_SAGEMAKER = {
    "sagemaker.endpoint_url": "--sagemaker-endpoint-url",
    "sagemaker.inference_component": "--inference-component",
    "sagemaker.target_variant": "--target-variant",
}
_ENGINE = "engine."
_OF_COMPUTING = ("engine.threads", "engine.backend", "engine.compile_shapes")
_OF_ANY_ENGINE = ("engine.tensor_parallel", "engine.dtype")
"""What a server runs with: the run keeps it, and a calibration on the run reads it."""
_SHORT_NAMES = {
    "tensor_parallel": "--tp",
    "enforce_eager": "--graphs",
    "max_rolling_batch_size": "--max-batch",
    "max_rolling_batch_prefill_tokens": "--prefill-tokens",
}


def refuse_idle_options(target: str, flags: Mapping[str, Any]) -> None:
    """Raise InputError for a flag that means nothing to this kind of target.

    flags  by their dotted names in the scenario; None, or a stream that is the default: not given
    """
    given = {name for name, value in flags.items() if value is not None and value is not True}
    given |= {name for name in flags if name.startswith(_ENGINE) and flags[name] is True}
    if is_endpoint(target):
        engine = sorted(
            name for name in given if name.startswith(_ENGINE) and name not in _OF_ANY_ENGINE
        )
        if engine:
            raise InputError(
                f"{_flag(engine[0])}: {_kind(target)} keeps its own engine settings; leave it out, "
                "or give it to whoever starts the server"
            )
    else:
        for name, flag in _OF_ENDPOINTS.items():
            if name in given:
                raise InputError(
                    f"{flag}: {target} runs in this process, without a connection; leave it out, "
                    "or measure an endpoint"
                )
    if target.startswith(SIMULATED_PREFIX):
        for name in _OF_COMPUTING:
            if name in given:
                raise InputError(
                    f"{_flag(name)}: a simulated engine computes nothing; leave it out"
                )
    if not target.startswith(SAGEMAKER_PREFIX):
        for name, flag in _OF_SAGEMAKER.items():
            if name in given:
                raise InputError(
                    f"{flag} is for a SageMaker endpoint: write sagemaker:NAME instead of {target}"
                )


def _kind(target: str) -> str:
    return "a SageMaker endpoint" if target.startswith(SAGEMAKER_PREFIX) else "an endpoint"


def _flag(name: str) -> str:
    setting = name.removeprefix(_ENGINE)
    return _SHORT_NAMES.get(setting, "--" + setting.replace("_", "-"))
