"""Commands from settings classes: each field an option, rare ones under --help-all, old names.

A mistake on the command line is shown with all others: missing options, unknown names, bad SLOs.
"""

import functools
import inspect
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperOption

from lmi_bench.cli.console import Form, shown_as
from lmi_bench.core.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, InputError, LmiBenchError
from lmi_bench.core.option import Option, default_note, filled, flag_of, settings_of
from lmi_bench.core.slo import parse_slo

JsonFile = Annotated[Path | None, Option("JSON file for the result.", ("--json",))]
_HELP_ALL = "--help-all"
_MARKS = "marks"
_FORM, _QUIET = "output_form", "is_quiet"
_FORM_HELP = "Form of the answer: table, plain (tab-separated, all columns) or json (one document)."
_QUIET_HELP = "Answer and warnings only, without progress and notes."
_FORM_OPTIONS = {
    _FORM: (Form, "table", Option(_FORM_HELP, ("--output",))),
    _QUIET: (bool, False, Option(_QUIET_HELP, ("--quiet", "-q"))),
}
"""What every command with figures has besides its own options."""
_WITHOUT_FORM = (
    *("report", "export", "import_results", "serve", "generate", "compile_steps", "convert", "package"),
    *("probe", "write", "refresh"),
)
"""Commands whose answer is files, a server or a text."""
_OF_THE_CATALOG = ("recommend", "predict", "compare_accelerators", "limits", "backends", "write")
"""Commands whose models and machines are the catalog's."""


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each dataclass parameter replaced by that dataclass's fields.

    Typer reads the options of a command from its signature. A field has `option(...)` as its value,
    another parameter of the command is `Annotated[type, Option]`; a field that is a dataclass
    itself is spread in turn. The command is called with the dataclass filled in.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    marks: dict[str, Option] = {}

    def add(name: str, bare: Any, default: Any, mark: Option) -> None:
        marks[name] = mark
        annotation = _as_typer(name, bare, default, mark)
        value = inspect.Parameter.empty if default is MISSING else default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=value, annotation=annotation))

    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            assert isinstance(parameter.annotation, type)
            groups[parameter.name] = parameter.annotation
            for each in settings_of(parameter.annotation):
                add(each.name, each.kind, each.default, each.option)
        else:
            bare, mark = get_args(parameter.annotation)  # Annotated[type, Option]
            is_required = parameter.default is parameter.empty
            add(parameter.name, bare, MISSING if is_required else parameter.default, mark)

    if command.__name__ not in _WITHOUT_FORM:
        for name, (bare, default, mark) in _FORM_OPTIONS.items():
            add(name, bare, default, mark)

    spread = _filling(command, groups, marks)
    vars(spread)["__signature__"] = inspect.Signature(parameters)
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    spread.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)  # typer folds them
    vars(spread)[_MARKS] = marks
    return spread


def _filling(
    command: Callable[..., None], groups: dict[str, type[Any]], marks: dict[str, Option]
) -> Callable[..., None]:
    """The command with its dataclasses filled from options, its answer in the wanted form."""

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        form, is_quiet = given.pop(_FORM, "table"), given.pop(_QUIET, False)
        with shown_as(form, is_quiet=is_quiet):
            stated = dict(given)
            try:
                for name, group in groups.items():
                    given[name] = filled(group, given)
                for name in {*marks} & {*given}:
                    marks[name].check(name, given[name])
                command(**given)
            except InputError as exc:
                if command.__name__ not in _OF_THE_CATALOG:
                    raise
                raise with_all_problems(exc, stated) from exc

    return spread


def _as_typer(name: str, bare: Any, default: Any, mark: Option) -> Any:
    """The annotation that Typer takes for an option."""
    common: dict[str, Any] = {
        "help": mark.help + default_note(mark, default),
        "metavar": mark.metavar,
        "envvar": mark.envvar,
        "rich_help_panel": mark.group,
        "show_default": False,
    }
    if mark.argument:
        return Annotated[_listed(bare), typer.Argument(**common)]
    names = mark.names or ((flag_of(name),) if bare is bool and default is False else ())
    return Annotated[_listed(bare), typer.Option(*names, **common)]


def _listed(bare: Any) -> Any:
    """Typer knows a repeatable option as a list; settings are frozen and hold a tuple."""
    for each in (bare, *get_args(bare)):
        if get_origin(each) is tuple:
            items: Any = list[get_args(each)[0]]  # type: ignore[misc]
            return items if each is bare else items | None
    return bare


@dataclass(slots=True)
class Ending:
    """How a signal ends this process's command; a shell may have Ctrl-C ignored."""

    word: str = "interrupted"
    code: int = EXIT_INTERRUPTED
    ignores_ctrl_c: bool = False


ENDING: Final = Ending()


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Turns SIGTERM into SIGINT, so that what is finished is kept and nothing temporary stays.

    Job schedulers, containers and `timeout` end a program by SIGTERM. A handler that is already
    set stays, and so do other threads than the main one, in which Python allows no handler.
    Where SIGINT is ignored, as in a script's background job, one is held until a SIGTERM comes.
    """
    only_int = {signal.SIGINT}

    def on_term(_number: int, _frame: FrameType | None) -> None:
        ENDING.word, ENDING.code = "terminated", EXIT_TERMINATED
        os.kill(os.getpid(), signal.SIGINT)  # not a second one after a held Ctrl-C
        signal.pthread_sigmask(signal.SIG_UNBLOCK, only_int)

    is_first = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or not is_first:
        yield
        return
    ENDING.ignores_ctrl_c = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, on_term)
    if ENDING.ignores_ctrl_c:
        signal.pthread_sigmask(signal.SIG_BLOCK, only_int)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if ENDING.ignores_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, only_int)


class Command(TyperCommand):
    """A command whose settings classes may mark options as rare and state their old names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        marks: dict[str, Option] = getattr(self.callback, _MARKS, {})
        self._rare = {name for name, mark in marks.items() if mark.rare}
        self._old_names = {
            old: mark.name_of(name) + equals + value
            for name, mark in marks.items()
            for old, equals, value in (each.partition("=") for each in mark.old_names)
        }
        self._bare = {mark.name_of(name): mark.bare for name, mark in marks.items() if mark.bare is not None}
        if self._rare:
            self.epilog = f"{len(self._rare)} more options: {_HELP_ALL}"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace the option names of earlier releases; show rare options for --help-all."""
        shows_all = bool(self._rare) and _HELP_ALL in args
        for param in self.params:
            if isinstance(param, TyperOption) and param.name in self._rare:
                param.hidden = not shows_all
        if shows_all:
            self.epilog = None
            typer.echo(self.get_help(ctx))
            ctx.exit()
        args = [self._renamed(arg) for arg in args]
        for arg in args:
            if (what := _OTHER_WORK.get(arg.partition("=")[0])) is not None:
                raise InputError(f"{arg}: lmi-bench does not {what}")
        stated = [  # with its value where it is an option whose number may be left out
            f"{arg}={self._bare[arg]}" if arg in self._bare and not following.lstrip("-").isdecimal() else arg
            for arg, following in pairwise((*args, ""))
        ]
        missing = missing_options(self.params, args)
        if missing and not {"--help", "-h"} & {*args}:
            raise InputError(f"{missing}: missing; {ctx.command_path} --help explains them")
        return super().parse_args(ctx, stated)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises InputError for a number that is not finite, or `-` as a file."""
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{param.opts[0]} {value}: give a finite number")
            if value == Path("-"):  # elsewhere often stdout; here it would become a file of that name
                hint = "; --output json prints the answer" if "--json" in param.opts else ""
                raise InputError(f"{param.opts[0]} -: name a file{hint}")
        try:
            with _termination_as_interrupt():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo(ENDING.word, err=True)
            raise typer.Exit(ENDING.code) from None

    def _renamed(self, arg: str) -> str:
        name, equals, value = arg.partition("=")
        new = self._old_names.get(name)
        if new is None:
            return arg
        typer.echo(f"{name} is now {new}; the next release drops the old name", err=True)
        return new + equals + value


_NO_ADAPTERS = "plan LoRA adapters; sweep --adapters measures them"
_TEXT_ALONE = "plan or measure {}, only text generation by decoder models"
_OTHER_WORK = {
    "--lora": _NO_ADAPTERS,
    "--lora-adapters": _NO_ADAPTERS,
    "--rerank": _TEXT_ALONE.format("rerankers"),
    "--image-size": _TEXT_ALONE.format("images"),
    "--audio": _TEXT_ALONE.format("audio"),
}
"""Options that other tools have for what is not done here."""


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
    from lmi_bench.analysis.model.local_machine import LOCAL_NAME
    from lmi_bench.catalog.instances import find_instance
    from lmi_bench.catalog.models import find_model

    instances = given.get("instance") or ()
    listed = [instances] if isinstance(instances, str) else instances
    checks: list[tuple[Callable[[str], object], str]] = []
    if isinstance(given.get("model"), str):
        checks.append((find_model, given["model"]))
    names = [name.strip() for text in listed for name in text.split(",")]
    if not given.get("prices"):  # whose file may name others
        checks += [(find_instance, name) for name in names if name != LOCAL_NAME]
    checks += [(parse_slo, text) for text in given.get("slo") or ()]
    for check, text in checks:
        try:
            check(text)
        except LmiBenchError as exc:
            yield str(exc)
