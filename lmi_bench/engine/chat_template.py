"""Renders chat messages with the Jinja template of a model's tokenizer.

Uses transformers' names and settings, in Jinja's sandbox: the template comes with the weights and
must not change its arguments or reach beyond them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import optional_object

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_CONFIG: Final = "tokenizer_config.json"
_UNSTATED: Final = {"tools": None, "documents": None, "add_generation_prompt": True}
"""Templates test for none; an undefined name fails that test."""


class ChatTemplate:
    """The templates of one model folder. takes_tools: one tells the model of a request's tools."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], *, where: str) -> None:
        """sources  by name: `default`, perhaps `tool_use` for requests with tools
        special_tokens  by their names in templates, such as bos_token
        where  the file, for error messages

        Raises InputError if a text is not a template.
        """
        with_tools = sources.get("tool_use", sources["default"])
        self.takes_tools = "tools" in with_tools
        self._special_tokens = dict(special_tokens)
        try:
            self._template, self._with_tools = map(_compiled, (sources["default"], with_tools))
        except TemplateError as exc:
            raise InputError(f"{where}: the chat template cannot be read: {exc}") from exc

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template that transformers would use; None if the folder has none. Raises InputError
        if one of its files is invalid."""
        config, where = optional_object(folder / _CONFIG), folder / _CONFIG
        stated = config.get("chat_template")
        named = stated if isinstance(stated, list) else [{"name": "default", "template": stated}]
        found = {str(e.get("name")): e.get("template") for e in named if isinstance(e, dict)}
        for main in (folder / "chat_template.jinja", folder / "chat_template.json"):
            if main.is_file():
                is_json, where = main.suffix == ".json", main
                text = optional_object(main).get("chat_template") if is_json else read_text(main)
                found = {"default": text}  # transformers has then no others by name
                break
        for beside in (folder / "additional_chat_templates").glob("*.jinja"):
            found[beside.stem] = read_text(beside)
        sources = {name: text for name, text in found.items() if isinstance(text, str)}
        if "default" not in sources:
            return None
        older = optional_object(folder / "special_tokens_map.json")
        tokens = {name: config.get(name) or older.get(name) for name in _SPECIAL_TOKENS}
        texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in tokens.items()}
        special_tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
        return cls(sources, special_tokens, where=str(where))

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """The prompt text of a chat up to the start of the answer, with special tokens as text.

        options  the template's own variables, such as Qwen3's enable_thinking
        Raises InputError if the template rejects the messages.
        """
        template = self._with_tools if options and options.get("tools") else self._template
        try:
            known = _UNSTATED | self._special_tokens | dict(options or {})
            return template.render(known | {"messages": messages})
        except Exception as exc:  # code that came with the model; only this request fails
            raise InputError(f"the model's chat template rejects these messages: {exc}") from exc


class _Generation(Extension):
    """`{% generation %}` marks the model's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # as transformers has it; Jinja's own would escape HTML markup
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
