"""Runs a model.py's input and output formatters on requests and replies.

As in LMI since 0.35 (djl-serving's "custom input/output formatter schema"), functions decorated
with `@input_formatter` and `@output_formatter` of `djl_python` take and return a decoded JSON
object. The file is user code, so it runs only if the user names it.
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from lmi_bench.core.errors import EngineError, InputError

Formatter = Callable[..., object]

_PACKAGE = "djl_python"
_PLACES = {"input_formatter": "input_parser", "output_formatter": "output_formatter"}


class FormatterError(EngineError):
    """A formatter raised an error or did not return an object; the container answers 424."""


@dataclass(frozen=True, slots=True)
class Formatters:
    """A model.py's decorated functions; None: bodies stay unchanged.

    on_input   called with the request's body and the keyword `tokenizer`
    on_output  called with each JSON object of the reply: the whole body, or a stream's line
    """

    on_input: Formatter | None = None
    on_output: Formatter | None = None

    def request(self, body: dict[str, Any], tokenizer: object) -> dict[str, Any]:
        """The body for the engine. Raises FormatterError."""
        if self.on_input is None:
            return body
        return _called("input_formatter", self.on_input, body, tokenizer=tokenizer)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The object to send instead of `body`. Raises FormatterError."""
        if self.on_output is None:
            return body
        result = _called("output_formatter", self.on_output, body)
        try:
            orjson.dumps(result)
        except TypeError as exc:
            raise FormatterError(f"the output_formatter's result is not JSON: {exc}") from exc
        return result


NO_FORMATTERS = Formatters()


def load_formatters(path: Path) -> Formatters:
    """Run a model.py and return its formatters. Raises InputError if it fails, has no formatter, or
    has two of one kind."""
    marked: dict[str, list[Formatter]] = {name: [] for name in _PLACES}  # input, output
    if not path.is_file():
        raise InputError(f"--model-py {path}: no such file")
    with _djl_python(marked):
        try:
            runpy.run_path(str(path))
        except Exception as exc:  # user code may raise anything
            raise InputError(f"--model-py {path}: {type(exc).__name__}: {exc}") from exc
    for name, found in marked.items():
        if len(found) > 1:
            raise InputError(f"--model-py {path}: {len(found)} functions have @{name}; keep one")
    if not any(marked.values()):
        raise InputError(
            f"--model-py {path} has no formatter: decorate a function with @input_formatter (from "
            f"{_PACKAGE}.input_parser) or @output_formatter (from {_PACKAGE}.output_formatter); "
            "a handle() function would replace the engine and is not run"
        )
    return Formatters(*(found[0] if found else None for found in marked.values()))


def _called(name: str, formatter: Formatter, body: dict[str, Any], **extras: Any) -> dict[str, Any]:
    try:
        result = formatter(body, **extras)
    except Exception as exc:  # user code; only this request fails
        raise FormatterError(f"the {name} failed: {type(exc).__name__}: {exc}") from exc
    if not isinstance(result, dict):
        raise FormatterError(f"the {name} returned {type(result).__name__}; it must return a dict")
    return result


@contextmanager
def _djl_python(marked: dict[str, list[Formatter]]) -> Iterator[None]:
    """Provide the two decorators, and nothing else, as the package `djl_python`."""

    def mark(name: str, formatter: Formatter) -> Formatter:
        marked[name].append(formatter)
        return formatter

    modules = {_PACKAGE: ModuleType(_PACKAGE)}
    for name, place in _PLACES.items():
        module = ModuleType(f"{_PACKAGE}.{place}")
        setattr(module, name, partial(mark, name))
        modules[module.__name__] = module
    kept = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(kept)
