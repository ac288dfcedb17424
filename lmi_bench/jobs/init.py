"""What `init` does: asks for the parts of a scenario, checks each at once, writes the file."""

import os.path
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast, get_args

import yaml

from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import installed_versions
from lmi_bench.core.listener import Listener
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.scenario import DEFAULT_MODEL, ENGINE_TARGET, SIMULATED_PREFIX, parse_scenario
from lmi_bench.jobs.settings.load import numbers
from lmi_bench.jobs.settings.setup import InitSettings
from lmi_bench.loadgen.http.endpoint import parse_endpoint
from lmi_bench.models.folder import TRAINED_NAMES, is_model_folder, trained_folder
from lmi_bench.targets.applies import kind_of
from lmi_bench.targets.open import open_bench
from lmi_bench.targets.prompts import DEMO_NAMES, DEMO_POSITIONS, longest_request
from lmi_bench.wire.format import find_format
from lmi_bench.wire.openai import OpenAiCompletionsFormat

T = TypeVar("T")
Kind = Literal["endpoint", "engine", "simulated", "plan"]
Ask = Callable[[str, str], str]
"""Asks a question with its default, which is the answer if nothing is typed."""

_KINDS: Final = get_args(Kind)
_KIND_OF_TARGET: Final = {"url": "endpoint", "sagemaker": "endpoint", "simulated": "simulated"}
_SECRET_NAME = re.compile(r"key|token|secret|sig|pass|auth|code|cred", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Question:
    """The options that state a part of the scenario, its question, and its default by kind."""

    flags: str
    text: str
    defaults: Mapping[str, str]


_WHAT: Final = "What to do: measure an endpoint, the bundled engine, a simulated instance, or plan"
_INIT: Final = resources.files("lmi_bench.jobs") / "data/init.yaml"
_TEXTS: Final = yaml.safe_load(_INIT.read_bytes())
_QUESTIONS: Final = {name: _Question(**each) for name, each in _TEXTS["questions"].items()}
_COMMENTS: Final[Mapping[str, str]] = _TEXTS["comments"]


@dataclass(frozen=True, slots=True)
class WrittenScenario:
    """The file, and the command that uses it."""

    file: Path
    command: str


def init(settings: InitSettings, listener: Listener, ask: Ask | None) -> WrittenScenario:
    """Write a scenario from options and answers.

    ask  None: nothing can be asked, so every part has to be stated, or `yes` takes the defaults
    Raises InputError for a stated part that cannot be used; nothing is written then.
    """
    asking = None if settings.yes else ask
    _check_file(settings, asking)
    stated = _stated(settings)
    if asking is None and not settings.yes:
        _check_complete(stated)

    def answered(
        question: _Question, default: str, given: str | None, put: Callable[[str], T]
    ) -> T:
        while True:
            try:
                if given is not None or asking is None:
                    return put(default if given is None else given)
                return put(asking(question.text, default).strip())
            except InputError as exc:
                if given is not None or asking is None:
                    raise
                listener.warn(str(exc))

    usual = "engine" if installed_versions(("torch",)) else "simulated"
    what = _Question("--kind", f"{_WHAT} only ({', '.join(_KINDS)})", {})
    kind = answered(what, usual, stated.get("kind"), _known_kind)
    content: dict[str, Any] = {"target": ENGINE_TARGET} if kind == "engine" else {}
    for name, question in _QUESTIONS.items():
        if kind in question.defaults:
            put = partial(_with_answer, content, kind, name)
            content = answered(question, question.defaults[kind], stated.get(name), put)
    use = "recommend --workload" if kind == "plan" else "sweep"
    write_text(settings.file, _document(content, f"lmi-bench {use} FILE"))
    return WrittenScenario(settings.file, f"lmi-bench {use} {shlex.quote(str(settings.file))}")


def _check_file(settings: InitSettings, ask: Ask | None) -> None:
    file = settings.file
    if file.suffix not in (".yaml", ".yml"):
        raise InputError(f"{file}: name a scenario file that ends in .yaml, such as scenario.yaml")
    if not file.exists() or settings.force:
        return
    if ask is None or not ask(f"{file} exists: replace it", "no").lower().startswith("y"):
        raise InputError(f"{file} exists and is unchanged: name another file, or add --force")


def _stated(settings: InitSettings) -> dict[str, str]:
    """The answers that the options state; a target decides the kind."""
    if settings.concurrency is not None and settings.rate is not None:
        raise InputError("give either --concurrency or --rate, not both")
    kind = settings.kind
    if settings.target is not None:
        by_target = _KIND_OF_TARGET.get(kind_of(settings.target), "engine")
        if (by_target == "engine") != (settings.target == ENGINE_TARGET):
            shown = redact_text(settings.target)
            raise InputError(
                f"--target {shown}: write engine, sim:INSTANCE, sagemaker:NAME or a URL"
            )
        if kind not in (None, by_target):
            raise InputError(f"--kind {kind} excludes --target {redact_text(settings.target)}")
        kind = by_target
    plain = ("target", "model", "input_tokens", "output_tokens")
    found = {"kind": kind, **{name: getattr(settings, name) for name in plain}}
    found["load"] = settings.concurrency if settings.rate is None else f"rate {settings.rate}"
    found["slo"] = ",".join(settings.slo) or None
    return {name: value for name, value in found.items() if value is not None}


def _check_complete(stated: Mapping[str, str]) -> None:
    """Raises InputError that names the options of all missing parts; an SLO may be missing."""
    kind = stated.get("kind")
    missing = [] if kind else ["--kind"]
    for name, question in _QUESTIONS.items():
        if name not in stated and name != "slo" and (kind is None or kind in question.defaults):
            missing.append(question.flags)
    if missing:
        raise InputError(
            f"there is no terminal to ask at: give {', '.join(missing)}, or --yes for the defaults"
        )


def _known_kind(text: str) -> Kind:
    if text not in _KINDS:
        raise InputError(f"{text!r} is none of {', '.join(_KINDS)}")
    return cast("Kind", text)


def _with_answer(before: Mapping[str, Any], kind: Kind, name: str, answer: str) -> dict[str, Any]:
    """The content with one more answer; raises InputError for one that cannot be used."""
    _refuse_secret(answer)
    content: dict[str, Any] = {**before}
    if name in ("input_tokens", "output_tokens"):
        if os.path.isfile(answer):  # noqa: PTH113  false, not an error, for any text
            path = shlex.quote(answer)
            raise InputError(
                f"{answer} is a file: `lmi-bench workload from {path} -o FILE.yaml` makes a "
                "scenario of a log"
            )
        key, value = (name, int(answer)) if answer.isdecimal() else (name[:-6] + "lengths", answer)
        content["workload"] = {**before.get("workload", {}), key: value}
    elif name == "load":
        content["load"] = _load(answer, kind)
    elif name == "slo":
        slos = [] if answer in ("", "none") else [each.strip() for each in answer.split(",")]
        content |= {"slo": slos} if slos else {}
    elif name == "target" and kind == "simulated":
        content["target"] = SIMULATED_PREFIX + answer.removeprefix(SIMULATED_PREFIX)
    else:
        content[name] = answer
    _check(content, kind, name)
    return content


def _refuse_secret(answer: str) -> None:
    names = re.findall(r"[?&;]([^=&;#]+)=", answer)
    if redact_text(answer) != answer or any(map(_SECRET_NAME.search, names)):
        raise InputError(
            "the address or name holds a key or a password, which a file must not: leave it out, "
            "and set LMI_BENCH_API_KEY or add -H to `sweep`"
        )


def _load(answer: str, kind: Kind) -> dict[str, Any]:
    word, _, rates = answer.partition(" ")
    if word == "rate":
        return {"rate_per_s": numbers("rate", rates)}
    if kind == "plan":
        raise InputError(f"{answer}: a plan is for requests per second, such as: rate 2")
    return {"concurrency": answer if answer == "auto" else numbers("users", answer)}


def _check(content: dict[str, Any], kind: Kind, name: str) -> None:
    """Check the answers as the command will that uses the file, as far as they are known."""
    scenario = parse_scenario(content, source="not possible")
    if name == "target":
        if kind == "simulated":
            find_instance(scenario.target.removeprefix(SIMULATED_PREFIX))
        elif kind_of(scenario.target) == "url":
            parse_endpoint(scenario.target, find_format(OpenAiCompletionsFormat.name))
        elif not scenario.target.partition(":")[2] or kind_of(scenario.target) != "sagemaker":
            raise InputError(f"{scenario.target!r} is no endpoint: write a URL or sagemaker:NAME")
        return
    if kind == "endpoint":
        return
    is_demo = kind == "engine" and scenario.model in DEMO_NAMES
    folder = trained_folder(scenario.model) or Path(scenario.model)
    if kind == "engine" and not is_demo and not is_model_folder(folder):
        raise InputError(
            f"the bundled engine takes {', '.join((*DEMO_NAMES, *TRAINED_NAMES))} or a Hugging "
            f"Face folder, not {scenario.model!r}"
        )
    if kind == "plan" and scenario.model == DEFAULT_MODEL:  # a scenario's model if none is stated
        raise InputError(f"{DEFAULT_MODEL} is for the bundled engine: name the model to plan for")
    positions = DEMO_POSITIONS if is_demo else find_model(str(folder)).max_positions
    known = content.get("workload", {})
    tokens = longest_request(scenario) if len(known) == 2 else known.get("input_tokens", 0)
    if tokens > positions:
        raise InputError(
            f"a request of {tokens:,} tokens exceeds the {positions:,} positions of "
            f"{scenario.model}: give shorter lengths"
        )
    if kind == "simulated":
        open_bench(scenario)


def _document(content: Mapping[str, Any], command: str) -> str:
    """The scenario as YAML, each field with its meaning."""
    lines = [f"# Written by `lmi-bench init`, for: {command}. Left-out fields have defaults."]

    def add(fields: Mapping[str, Any], indent: str = "") -> None:
        for key, value in fields.items():
            if isinstance(value, dict):
                lines.append(f"{indent}{key}:")
                add(value, indent + "  ")
                continue
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            text = text.removesuffix("...\n").strip()
            lines.append(f"{indent}{key}: {text}  # {_COMMENTS[key]}")

    add(content)
    return "\n".join(lines) + "\n"
