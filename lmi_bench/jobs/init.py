"""What `init` does: asks for the parts of a scenario, checks each at once, writes the file."""

import os.path
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core import scenario as scenarios
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import installed_versions
from lmi_bench.core.listener import Listener
from lmi_bench.core.option import numbers
from lmi_bench.core.redaction import redact_text
from lmi_bench.jobs.settings.setup import InitSettings
from lmi_bench.loadgen.http.endpoint import parse_endpoint
from lmi_bench.models.folder import TRAINED_NAMES, is_model_folder, trained_folder
from lmi_bench.targets.applies import kind_of
from lmi_bench.targets.open import open_bench
from lmi_bench.targets.prompts import DEMO_NAMES, DEMO_POSITIONS, longest_request
from lmi_bench.wire.format import find_format

Ask = Callable[[str, str], str]
"""Asks a question with its default, which is the answer if nothing is typed."""
_KINDS: Final = ("endpoint", "engine", "simulated", "plan")
_KIND_OF_TARGET: Final = {"url": "endpoint", "sagemaker": "endpoint", "simulated": "simulated"}
_SECRET_NAME: Final = re.compile(r"key|token|secret|sig|pass|auth|code|cred", re.IGNORECASE)
# stands for lengths that are not answered yet
_SHORTEST: Final = {"workload.input_tokens": 1, "workload.output_tokens": 1}


@dataclass(frozen=True, slots=True)
class Question:
    """A row of data/init.yaml, which explains its fields."""

    name: str
    flags: str
    text: str
    defaults: Mapping[str, str]
    field: str = ""
    comment: str = ""


_FILE: Final = resources.files("lmi_bench.jobs") / "data/init.yaml"
_KIND, *_QUESTIONS = (Question(**each) for each in yaml.safe_load(_FILE.read_bytes()))


def init(settings: InitSettings, listener: Listener, ask: Ask | None) -> str:
    """Write a scenario from options and answers; returns the command that uses it.

    ask  None: nothing can be asked, so every part has to be stated, or `yes` takes the defaults
    Raises InputError for a stated part that cannot be used; nothing is written then.
    """
    asking = None if settings.yes else ask
    _check_file(settings, asking)
    stated = _stated(settings)
    kind = stated.get("kind")
    missing = [
        each.flags
        for each in (_KIND, *_QUESTIONS)
        if each.name not in (*stated, "slo") and (kind is None or kind in each.defaults)
    ]
    if missing and ask is None and not settings.yes:
        flags = ", ".join(missing)
        raise InputError(f"there is no terminal to ask at: give {flags}, or --yes for the defaults")

    def answered(question: Question, default: str, put: Callable[[str], dict[str, Any]]) -> Any:
        given = stated.get(question.name)
        if given is not None or asking is None:
            return put(default if given is None else given)
        while True:
            try:
                return put(asking(question.text, default).strip())
            except InputError as exc:
                listener.warn(str(exc))

    usual = "engine" if installed_versions(("torch",)) else "simulated"
    kind = (known := answered(_KIND, usual, _known_kind)).pop("kind")
    for each in _QUESTIONS:
        if kind in each.defaults:
            known = answered(each, each.defaults[kind], partial(_with_answer, known, kind, each))
    use = "recommend --workload" if kind == "plan" else "sweep"
    write_text(settings.file, _document(known, f"lmi-bench {use} FILE"))
    return f"lmi-bench {use} {shlex.quote(str(settings.file))}"


def _check_file(settings: InitSettings, ask: Ask | None) -> None:
    file = settings.file
    if file.suffix not in (".yaml", ".yml"):
        raise InputError(f"{file}: name a scenario file that ends in .yaml, such as scenario.yaml")
    if not file.exists() or settings.force:
        return
    if ask is None or not ask(f"{file} exists: replace it", "no").lower().startswith("y"):
        raise InputError(f"{file} exists and is unchanged: name another file, or add --force")


def _stated(settings: InitSettings) -> dict[str, str]:
    """The answers that the options state, by question; a target decides the kind."""
    if settings.concurrency is not None and settings.rate is not None:
        raise InputError("give either --concurrency or --rate, not both")
    kind, target = settings.kind, settings.target
    if target is not None:
        shown = redact_text(target)
        by_target = _KIND_OF_TARGET.get(kind_of(target), "engine")
        if by_target == "engine" and target != scenarios.ENGINE_TARGET:
            raise InputError(f"--target {shown}: write engine, sim:INSTANCE, sagemaker:NAME or a URL")
        if kind not in (None, by_target):
            raise InputError(f"--kind {kind} excludes --target {shown}")
        kind = by_target
    found = {name: getattr(settings, name) for name in ("model", "input_tokens", "output_tokens")}
    found |= {"kind": kind, "target": target}
    found["load"] = settings.concurrency if settings.rate is None else f"rate {settings.rate}"
    found["slo"] = ",".join(settings.slo) or None
    return {name: value for name, value in found.items() if value is not None}


def _known_kind(answer: str) -> dict[str, Any]:
    if answer not in _KINDS:
        raise InputError(f"{answer!r} is none of {', '.join(_KINDS)}")
    return {"kind": answer, **({"target": scenarios.ENGINE_TARGET} if answer == "engine" else {})}


def _with_answer(known: Mapping[str, Any], kind: str, question: Question, answer: str) -> dict[str, Any]:
    """The fields with one more answer; raises InputError for one that cannot be used."""
    named = map(_SECRET_NAME.search, re.findall(r"[?&;]([^=&;#]+)=", answer))
    if redact_text(answer) != answer or any(named):
        raise InputError(
            "the address or name holds a key or a password, which a file must not: leave it out, "
            "and set LMI_BENCH_API_KEY or add -H to `sweep`"
        )
    place, value = _read(question.field, kind, answer)
    content = {**known, place: value}
    _check(scenarios.parse_scenario({}).with_overrides({**_SHORTEST, **content}), kind, place)
    return content


def _read(place: str, kind: str, answer: str) -> tuple[str, Any]:
    """The field of the scenario that an answer states, and its value."""
    if place.endswith("_tokens"):
        if os.path.isfile(answer):  # noqa: PTH113  false, not an error, for any text
            raise InputError(
                f"{answer} is a file: `lmi-bench workload from {shlex.quote(answer)} -o FILE.yaml` "
                "makes a scenario of a log"
            )
        is_number = answer.isdecimal()
        return (place, int(answer)) if is_number else (place.replace("tokens", "lengths"), answer)
    if place == "load.concurrency":
        word, _, rates = answer.partition(" ")
        if word == "rate":
            return "load.rate_per_s", numbers("rate", rates)
        if kind == "plan":
            raise InputError(f"{answer}: a plan is for requests per second, such as: rate 2")
        return place, answer if answer == scenarios.AUTO else numbers("users", answer)
    if place == "slo":
        return place, [] if answer in ("", "none") else [one.strip() for one in answer.split(",")]
    if place == "target" and kind == "simulated":
        return place, scenarios.SIMULATED_PREFIX + answer.removeprefix(scenarios.SIMULATED_PREFIX)
    return place, answer


def _check(scenario: scenarios.Scenario, kind: str, place: str) -> None:
    """Check the answers as the command will that uses the file, as far as they are known."""
    target, model = scenario.target, scenario.model
    if place == "target":
        if kind == "simulated":
            find_instance(target.removeprefix(scenarios.SIMULATED_PREFIX))
        elif kind_of(target) == "url":
            parse_endpoint(target, find_format("openai"))
        elif not target.partition(":")[2] or kind_of(target) != "sagemaker":
            raise InputError(f"{target!r} is no endpoint: write a URL or sagemaker:NAME")
        return
    if kind == "endpoint":
        return
    is_demo, folder = kind == "engine" and model in DEMO_NAMES, trained_folder(model) or Path(model)
    if kind == "engine" and not is_demo and not is_model_folder(folder):
        raise InputError(
            f"the bundled engine takes {', '.join((*DEMO_NAMES, *TRAINED_NAMES))} or a Hugging "
            f"Face folder, not {model!r}"
        )
    if kind == "plan" and model == scenarios.DEFAULT_MODEL:  # a scenario's model if none is stated
        raise InputError(f"{scenarios.DEFAULT_MODEL} is for the bundled engine: name the model to plan for")
    positions = DEMO_POSITIONS if is_demo else find_model(str(folder)).max_positions
    if (tokens := longest_request(scenario)) > positions:
        raise InputError(
            f"a request of {tokens:,} tokens exceeds the {positions:,} positions of {model}: give shorter lengths"
        )
    if kind == "simulated":
        open_bench(scenario)


def _document(content: Mapping[str, Any], command: str) -> str:
    """The scenario as YAML, each field with its meaning."""
    lines = [f"# Written by `lmi-bench init`, for: {command}. Left-out fields have defaults."]
    comments = {each.field: each.comment for each in _QUESTIONS}
    for place, value in content.items():
        section, dot, name = place.rpartition(".")
        if dot and f"{section}:" not in lines:
            lines.append(f"{section}:")
        asked = place.replace("lengths", "tokens").replace("rate_per_s", "concurrency")
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        shown = text.removesuffix("...\n").strip()
        lines.append(f"{'  ' if dot else ''}{name}: {shown}  # {comments[asked]}")
    return "\n".join(lines) + "\n"
