"""A command of `lmi-bench`: finite numbers, names of earlier releases, and rare options."""

from __future__ import annotations

import math
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from lmi_bench.cli.options.spread import OLD_NAMES, RARE
from lmi_bench.core.errors import InputError

_HELP_ALL = "--help-all"


class Command(TyperCommand):
    """A command whose settings classes may mark options as rare and state their old names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rare: frozenset[str] = getattr(self.callback, RARE, frozenset())
        self._old_names: dict[str, str] = getattr(self.callback, OLD_NAMES, {})
        if self._rare:
            self.epilog = f"{len(self._rare)} more options: {_HELP_ALL}"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Options of earlier releases count as what they are called now."""
        if self._rare and _HELP_ALL in args:
            self._show_rare(True)
            self.epilog = None
            typer.echo(self.get_help(ctx))
            ctx.exit()
        self._show_rare(False)
        return super().parse_args(ctx, [self._renamed(arg) for arg in args])

    def invoke(self, ctx: Any) -> Any:
        """Run it, or raise InputError with the option and its value: `nan` passes any range."""
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{param.opts[0]} {value}: give a finite number")
        return super().invoke(ctx)

    def _renamed(self, arg: str) -> str:
        name, equals, value = arg.partition("=")
        new = self._old_names.get(name)
        if new is None:
            return arg
        typer.echo(f"{name} is now {new}; the old name goes with the next release", err=True)
        return new + equals + value

    def _show_rare(self, shown: bool) -> None:
        for param in self.params:
            if isinstance(param, TyperOption) and param.name in self._rare:
                param.hidden = not shown
