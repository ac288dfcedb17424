"""Checks a container's configuration for mistakes and traps, by the container's version.

A mistake stops the server from starting or makes it ignore a setting; with a trap it starts but
does not behave as the author intended. Source: the validators and the release notes of
djl-serving 0.26 to 0.36.

The containers of vLLM, SGLang and TGI are configured by variables, as written in .env. AWS's images
of vLLM and SGLang turn SM_VLLM_NAME and SM_SGLANG_NAME into the engine's arguments, which end the
container if they are wrong. TGI's are those of its launcher.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from lmi_bench.analysis.model.capacity import WITHOUT_FLOAT16
from lmi_bench.catalog.models import find_model_entry
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.engine_arguments import Argument, argument_history, engine_arguments, version_key
from lmi_bench.deploy.images import SERVER_FACTS, all_images, find_image
from lmi_bench.deploy.option_table import ERAS, PREFIX, all_options, nearest

NEWEST: Final = "0.38.0"
_RENAMED: Final = {row["name"]: row["key"] for row in read_rows("lmi_renamed.csv", "deploy")}
_ARGUMENT_OF: Final = {
    "option.cpu_offload_gb_per_gpu": "option.cpu_offload_gb",
    "option.max_rolling_batch_prefill_tokens": "option.max_num_batched_tokens",
}
"""LMI's own names of vLLM's arguments."""
_NEAR_MISS, _NEAR = 0.85, 0.75  # where the engine's arguments are known, and where not
_WITHOUT_VLLM: Final = ("trtllm", "deepspeed", "tnx", "scheduler")
_JAVA_ENGINES: Final = ("rust", "onnxruntime", "pytorch")
"""Their unknown keys are arguments of the model's translator."""
_UNSTATED: Final = {"option.rolling_batch": "auto", "engine": "Python", "batch_size": "1"}
_CONDITION: Final = re.compile(r"(?:^| )([\w.]+)([=!>])(\S*)")
_ROLLING_OF_ERA: Final = {row["era"]: row["names"].split() for row in read_rows("lmi_rolling_batches.csv", "deploy")}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Problems of a configuration, one line each: mistakes, and traps that only warn."""

    mistakes: tuple[str, ...]
    traps: tuple[str, ...]

    def raise_mistakes(self, source: str) -> None:
        """Raise InputError with every mistake, if there are any."""
        lines = "\n".join(f"  {line}" for line in self.mistakes)
        if self.mistakes:
            several = f"{len(self.mistakes)} mistakes\n{lines}"
            raise InputError(f"{source}: {several if len(self.mistakes) > 1 else lines.strip()}")


def era_of(djl_version: str) -> str:
    """The era of a djl-serving version such as 0.26.0; raises InputError for other text."""
    parts = djl_version.split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts) or parts[0] != "0":
        raise InputError(f"djl-serving version {djl_version!r}: write one such as 0.26.0 or 0.36.0")
    minor = int(parts[1])
    return "A" if minor <= 26 else "B" if minor <= 34 else "C"


def container_of(version: str) -> tuple[str, str]:
    """The era and the vLLM version of an LMI container; no version where it is not known.

    version  lmi28, a tag, or a version of djl-serving, which stands for its newest image
    """
    known = [one for one in all_images() if one.family == "lmi"]
    images = [one for one in known if one.is_named(version)]
    era = era_of(images[-1].djl if images else version)
    if not images:  # of the last release before it, as 0.35.1
        at = version_key(version)
        images = [one for one in known if version_key(one.djl) <= at and era_of(one.djl) == era]
    return era, images[-1].engine_version if images else ""


def container_for(settings: Mapping[str, str]) -> str:
    """The newest of three versions of djl-serving in which all of these settings have an effect."""
    rolling = settings.get("option.rolling_batch", "auto").lower()
    async_mode = rolling in ("auto", "disable") and settings.get("batch_size", "1") == "1"
    of_2023 = (
        (settings.get("engine") == "MPI" and rolling != "trtllm")
        or rolling == "lmi-dist"
        or (async_mode and "option.output_formatter" in settings)
    )
    known = [all_options()[name] for name in settings if name in all_options()]
    for era, version in (("C", NEWEST), ("B", "0.32.0")):
        has_all = all(era in option.eras for option in known) and rolling in _ROLLING_OF_ERA[era]
        if has_all and not (era == "C" and of_2023):
            return version
    return "0.26.0"


def check_settings(
    settings: Mapping[str, str], *, era: str = "C", vllm: str = "", allowed: Collection[str] = ()
) -> Verdict:
    """Mistakes and traps of a configuration in one era of djl-serving.

    vllm     version inside the container; empty: its arguments are not checked
    allowed  names to accept although the tables lack them
    """
    mistakes: list[str] = []
    traps: list[str] = []
    rolling = settings.get("option.rolling_batch", "auto").lower()
    runs_java = settings.get("engine", "Python").lower() in _JAVA_ENGINES
    in_vllm: Mapping[str, Argument] = {}  # the arguments that LMI passes on, by their option
    if not runs_java and rolling not in _WITHOUT_VLLM:
        known_to_vllm = engine_arguments("vllm", vllm).values()
        in_vllm = {PREFIX + each.name: each for each in known_to_vllm if each.part == "engine"}
    for name, value in settings.items():
        option, bare = all_options().get(name), name.removeprefix(PREFIX)
        argument = in_vllm.get(_ARGUMENT_OF.get(name, name))
        if name in _RENAMED:
            mistakes.append(f"{name} is not read; the key is {_RENAMED[name]}")
        elif option or argument:
            # LMI translates the values of its own options, and passes vLLM's on
            is_own = option is not None and (argument is None or "vllm" not in option.backends)
            known = option if is_own else argument
            problem = known and known.problem(value)
            if name == "option.quantize" and in_vllm:
                problem = in_vllm["option.quantization"].problem(value)
            if problem:
                mistakes.append(f"{name}={value}: {problem}")
            elif option and argument is None and era not in option.eras:
                when = " and ".join(ERAS[letter] for letter in option.eras)
                traps.append(f"{name} is read only {when}; here it has no effect")
        elif not (runs_java or {name, bare} & {*allowed}):
            is_trap, line = _unknown(name, in_vllm, vllm)
            (traps if is_trap else mistakes).append(line)
    if in_vllm and settings.get("option.pipeline_parallel_degree", "1") != "1":
        mistakes.append("option.pipeline_parallel_degree: LMI accepts only 1 with vLLM")
    if rolling not in _ROLLING_OF_ERA[era]:
        names = ", ".join(_ROLLING_OF_ERA[era])
        absent = f"does not exist {ERAS[era]}; there is {names}"
        mistakes.append(f"option.rolling_batch={rolling} {absent}")
    mistakes += _by_rules("mistake", settings, era)
    if in_vllm and settings.get("option.dtype", "") in ("fp16", "float16", "half"):
        model = settings.get("option.model_id", "")
        with suppress(InputError):  # a folder
            if find_model_entry(model).shape.architecture in WITHOUT_FLOAT16:
                refusal = f"vLLM refuses float16 for {model}, which overflows in it: write auto"
                mistakes.append(f"option.dtype: {refusal}")
    traps += _by_rules("trap", settings, era) if not runs_java else ()
    return Verdict(tuple(mistakes), tuple(traps))


def _unknown(name: str, in_vllm: Mapping[str, Argument], vllm: str) -> tuple[bool, str]:
    """Whether an unknown key is a trap instead of a mistake, and its line.

    A container drops an option that neither LMI nor its vLLM knows, without a word.
    """
    if not name.startswith(PREFIX):
        advice = nearest(name) or f"; if the engine knows it, --allow {name}"
        return False, f"unknown key {name}{advice}"
    if not in_vllm:
        near = nearest(name, cutoff=_NEAR)
        says = f"unknown key {name}{near}"
        return not near, says if near else f"{says}: it counts only if the handler reads it"
    elsewhere = [row for row in argument_history("vllm") if PREFIX + row.name == name]
    if elsewhere:
        until = elsewhere[-1].until
        when = f"since {elsewhere[0].since}" + (f", before {until}" if until else "")
        return True, f"{name} has no effect: vLLM {vllm} lacks it (it is an argument {when})"
    near = nearest(name, (*all_options(), *in_vllm), _NEAR_MISS)
    if near:
        return False, f"unknown key {name}{near}"
    return True, f"{name} has no effect: neither LMI nor vLLM {vllm} knows it"


def _by_rules(kind: str, settings: Mapping[str, str], era: str) -> Iterator[str]:
    """The lines of data/lmi_rules.csv whose conditions all hold in this era.

    A condition is `name=pattern`, `name!pattern` for a value that does not match it, or
    `name>number`; the pattern `$other` is another setting's value. The value of a setting that is
    neither stated nor in `_UNSTATED` is empty.
    """
    values = {**_UNSTATED, **settings}
    values["option.rolling_batch"] = values["option.rolling_batch"].lower()

    def holds(name: str, sign: str, pattern: str) -> bool:
        value = values.get(name, "")
        if sign == ">":
            return value.isdecimal() and int(value) > int(pattern)
        other = re.escape(values.get(pattern[1:], "")) if pattern.startswith("$") else pattern
        return bool(re.fullmatch(other, value)) == (sign == "=")

    for row in read_rows("lmi_rules.csv", "deploy"):
        if row["kind"] != kind or era not in row["eras"]:
            continue
        conditions = _CONDITION.findall(row["when"])
        if all(holds(*each) for each in conditions):
            stated = [f"{name}={values.get(name, '')}" for name, *_ in conditions]
            rolling = values["option.rolling_batch"]
            yield row["text"].format(value=stated[0], other=stated[-1], rolling=rolling)


def check_variables(kind: str, variables: Mapping[str, str], allowed: Collection[str] = ()) -> Verdict:
    """Mistakes in a container's variables, by the arguments of the newest image of its kind.

    kind     vllm, sglang or tgi
    allowed  variables to accept although the engine lacks their argument
    """
    mistakes: list[str] = []
    version = find_image(kind).engine_version
    known, prefix = engine_arguments(kind, version), SERVER_FACTS[kind]["variables"]
    if not prefix:  # TGI's variables have the names of its arguments
        for name in known.keys() & variables.keys():
            problem = known[name].problem(variables[name])
            mistakes += [f"{name}={variables[name]}: {problem}"] if problem else []
        prompt = variables.get("MAX_INPUT_TOKENS") or variables.get("MAX_INPUT_LENGTH", "")
        total = variables.get("MAX_TOTAL_TOKENS", "")
        if prompt.isdecimal() and total.isdecimal() and int(prompt) >= int(total):
            mistakes.append(f"MAX_TOTAL_TOKENS={total} must be above the prompt's limit, {prompt}")
        return Verdict(tuple(sorted(mistakes)), ())
    for name, value in variables.items():
        if not name.startswith(prefix) or name in allowed:
            continue
        bare = name.removeprefix(prefix).lower()
        names = (bare, bare.removeprefix("no_"), f"{bare}_size")  # SGLang's --tp is --tp-size
        argument = next(filter(None, map(known.get, names)), None)
        if argument is None and bare != "model":
            near = nearest(bare, known).replace("_", "-")
            mistakes.append(f"{name}: {kind} {version} has no argument {bare}{near}")
        elif argument is not None and (problem := argument.problem(value)):
            mistakes.append(f"{name}={value}: {problem}")
    return Verdict(tuple(mistakes), ())
