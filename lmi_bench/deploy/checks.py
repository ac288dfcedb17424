"""Checks an LMI configuration for mistakes and traps, by the container's version.

A mistake stops the server from starting or makes it ignore a setting; with a trap it starts but
does not behave as the author intended. Source: the validators and the release notes of
djl-serving 0.26 to 0.36.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.deploy.option_table import ERAS, PREFIX, all_options, nearest

_SAGEMAKER_LONGEST_S: Final = 3600
_RENAMED: Final = {
    "option.max_rolling_batch": "option.max_rolling_batch_size",
    "option.max_batch_delay": "max_batch_delay",
    "option.batch_size": "batch_size",
    "option.job_queue_size": "job_queue_size",
    "option.engine": "engine",
}
_ROLLING_UNDER_MPI: Final = ("lmi-dist", "trtllm", "deepspeed")
_ROLLING_OF_ERA: Final = {
    "A": ("auto", "lmi-dist", "vllm", "trtllm", "scheduler", "deepspeed", "disable"),
    "B": ("auto", "lmi-dist", "vllm", "trtllm", "scheduler", "deepspeed", "tnx", "disable"),
    "C": ("auto", "vllm", "trtllm", "disable", "lmi-dist"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Problems of a configuration, one line each: mistakes, and traps that only warn."""

    mistakes: tuple[str, ...]
    traps: tuple[str, ...]

    def raise_mistakes(self, source: str) -> None:
        """Raise InputError with every mistake, if there are any."""
        if len(self.mistakes) == 1:
            raise InputError(f"{source}: {self.mistakes[0]}")
        if self.mistakes:
            lines = "\n".join(f"  {line}" for line in self.mistakes)
            raise InputError(f"{source}: {len(self.mistakes)} mistakes\n{lines}")


def era_of(djl_version: str) -> str:
    """The era of a djl-serving version such as 0.26.0; raises InputError for other text."""
    parts = djl_version.split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts) or parts[0] != "0":
        raise InputError(f"djl-serving version {djl_version!r}: write one such as 0.26.0 or 0.36.0")
    minor = int(parts[1])
    return "A" if minor <= 26 else "B" if minor <= 34 else "C"


def check_settings(
    settings: Mapping[str, str], *, era: str = "C", allowed: Collection[str] = ()
) -> Verdict:
    """Mistakes and traps of a configuration in one era of djl-serving.

    allowed  names to accept although the table lacks them, such as a new vLLM argument
    """
    mistakes: list[str] = []
    traps: list[str] = []
    options = all_options()
    for name, value in settings.items():
        option = options.get(name)
        if name in _RENAMED:
            mistakes.append(f"{name} is not read; the key is {_RENAMED[name]}")
        elif option is None and name not in allowed and name.removeprefix(PREFIX) not in allowed:
            advice = nearest(name) or f"; if the engine knows it, --allow {name}"
            mistakes.append(f"unknown key {name}{advice}")
        elif option is not None:
            problem = option.problem(value)
            if problem is not None:
                mistakes.append(f"{name}={value}: {problem}")
            elif era not in option.eras:
                when = " and ".join(ERAS[letter] for letter in option.eras)
                traps.append(f"{name} is read only {when}; here it has no effect")
    mistakes += _conflicts(settings, era)
    traps += _traps(settings, era)
    return Verdict(tuple(mistakes), tuple(traps))


def _conflicts(settings: Mapping[str, str], era: str) -> Iterator[str]:
    """Settings that a container's validator rejects."""
    rolling = settings.get("option.rolling_batch", "auto").lower()
    engine = settings.get("engine", "Python")
    batch_size = settings.get("batch_size", "1")
    if rolling not in _ROLLING_OF_ERA[era]:
        names = ", ".join(_ROLLING_OF_ERA[era])
        yield f"option.rolling_batch={rolling} does not exist {ERAS[era]}; there is {names}"
    if era == "A":
        if engine == "Python" and rolling in _ROLLING_UNDER_MPI:
            yield (f"engine=Python has no rolling batch {rolling}: up to 0.26 it needs engine=MPI")
        if engine == "MPI" and rolling == "vllm":
            yield "engine=MPI has no rolling batch vllm: it needs engine=Python"
    if batch_size.isdecimal() and int(batch_size) > 1 and rolling not in ("auto", "disable"):
        yield (
            f"batch_size={batch_size} is dynamic batching and option.rolling_batch={rolling} is "
            "not: remove one of the two"
        )
    if settings.get("option.async_mode") == "true" and rolling not in ("auto", "disable"):
        yield "option.async_mode=true excludes a rolling batch: set it to disable"
    for alias, name in (
        ("option.max_num_seqs", "option.max_rolling_batch_size"),
        ("option.tensor_parallel_size", "option.tensor_parallel_degree"),
    ):
        if alias in settings and settings[alias] != settings.get(name, settings[alias]):
            yield f"{alias}={settings[alias]} and {name}={settings[name]} must be equal"
    rotary = ("option.rotary_scaling_type", "option.rotary_scaling_factor")
    if sum(name in settings for name in rotary) == 1:
        yield f"{rotary[0]} and {rotary[1]} must be set together: give both or neither"


def _traps(settings: Mapping[str, str], era: str) -> Iterator[str]:
    """Settings that do not do what they seem to."""
    rolling = settings.get("option.rolling_batch", "auto").lower()
    seconds = settings.get("option.model_loading_timeout", "")
    if seconds.isdecimal() and int(seconds) > _SAGEMAKER_LONGEST_S:
        yield (
            f"option.model_loading_timeout={seconds}: SageMaker waits at most "
            f"{_SAGEMAKER_LONGEST_S} s for a container to become healthy"
        )
    if settings.get("option.trust_remote_code", "false").lower() == "true":
        yield (
            "option.trust_remote_code=true runs Python code that comes with the weights: read it, "
            "and pin option.revision"
        )
    if "option.max_rolling_batch_size" not in settings and era == "C" and rolling == "auto":
        yield (
            "option.max_rolling_batch_size is not set: with rolling_batch=auto it is 32 since "
            "0.35, although the documentation says 256"
        )
    if era == "C":
        if settings.get("engine") == "MPI" and rolling != "trtllm":
            yield "engine=MPI: since 0.35 Python is right for every backend except trtllm"
        if rolling == "lmi-dist":
            yield "option.rolling_batch=lmi-dist is silently vLLM since 0.33"
        if "option.output_formatter" in settings and rolling in ("auto", "disable"):
            yield "option.output_formatter has no effect in async mode (auto since 0.35)"
    if era == "A" and "option.output_formatter" not in settings:
        yield (
            "option.output_formatter is not set: 0.26 then streams one JSON object in pieces; a "
            "client that reads lines needs jsonlines"
        )
    if settings.get("option.quantize", "") in ("awq", "gptq") and era == "C":
        yield (
            f"option.quantize={settings['option.quantize']}: vLLM reads it from the checkpoint; "
            "setting it disables the faster Marlin kernels"
        )
