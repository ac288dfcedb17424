"""All that is wrong with a command line at once: missing options, unknown names, bad SLOs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.slo import parse_slo

_NO_ADAPTERS = "plan LoRA adapters; sweep --adapters measures them"
_TEXT_ALONE = "plan or measure {}, only text generation by decoder models"
_OTHER_WORK = {
    "--lora": _NO_ADAPTERS, "--lora-adapters": _NO_ADAPTERS,
    "--rerank": _TEXT_ALONE.format("rerankers"), "--image-size": _TEXT_ALONE.format("images"),
    "--audio": _TEXT_ALONE.format("audio"),
}  # fmt: skip
"""Options that other tools have for what is not done here."""


def check_purpose(args: Sequence[str]) -> None:
    """Raise InputError for an option of work that lmi-bench does not do."""
    for arg in args:
        what = _OTHER_WORK.get(arg.partition("=")[0])
        if what is not None:
            raise InputError(f"{arg}: lmi-bench does not {what}")


def missing_options(params: Sequence[Any], args: Sequence[str]) -> str:
    """What a command needs and its arguments lack, as one list."""
    given = {arg.partition("=")[0] for arg in args}
    has_words = any(not arg.startswith("-") for arg in args)  # perhaps an option's value
    lacks = []
    for param in params:
        is_option = param.param_type_name == "option"
        if param.required and not (given & {*param.opts} if is_option else has_words):
            lacks.append(param.opts[0] if is_option else param.metavar or param.name)
    return ", ".join(lacks)


def with_all_problems(error: InputError, given: Mapping[str, Any]) -> InputError:
    """The error, with the unknown names and unreadable SLOs beside it."""
    found = [str(error), *_wrong_names(given)]
    lines = list(dict.fromkeys(found))
    if len(lines) == 1:
        return error
    return InputError("\n  ".join([f"{len(lines)} mistakes", *lines]))


def _wrong_names(given: Mapping[str, Any]) -> Iterator[str]:
    from lmi_bench.catalog.instances import find_instance
    from lmi_bench.catalog.models import find_model

    instances = given.get("instance") or ()
    listed = [instances] if isinstance(instances, str) else instances
    checks: list[tuple[Callable[[str], object], str]] = []
    if isinstance(given.get("model"), str):
        checks.append((find_model, given["model"]))
    checks += [(find_instance, name.strip()) for text in listed for name in text.split(",")]
    checks += [(parse_slo, text) for text in given.get("slo") or ()]
    for check, text in checks:
        try:
            check(text)
        except LmiBenchError as exc:
            yield str(exc)
