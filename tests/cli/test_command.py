"""Settings classes as the options of a command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from lmi_bench.cli.command import Command, spread_options
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, Option, filled, option, settings_of
from lmi_bench.core.option import Settings as Base


@dataclass(frozen=True, slots=True)
class Load:
    users: int = option("Users at once.", value=3, old_names=("--copies",))
    words: tuple[str, ...] = option("Words.", "--word", value=())
    hosts: tuple[str, ...] | None = option("Hosts.", "--host", default="one")


@dataclass(frozen=True, slots=True)
class Settings:
    run: Path = option("Run folder.", value=REQUIRED, argument=True)
    load: Load
    is_fast: bool | None = option("Speed.", "--fast/--slow", rare=True)
    not_an_option: int = 4
    port: int | None = option("Port.", bare=0)


NINE = Load(users=9)


@dataclass(frozen=True, slots=True)
class Documented:
    """The text of a field is its help.

    A colon: or two  spaces in prose name no field.

    users  Users at once,
        of one level.
    """

    users: int = option("--many", value=3)
    rate: float | None = option("Requests per second.", "--rate")


@pytest.fixture
def call():
    """Calls a command with these settings; returns them and what was printed."""
    seen = []
    app = typer.Typer()

    @spread_options
    def command(settings: Settings, json_file: Annotated[Path | None, Option("File.")] = None):
        seen.append((settings, json_file))

    app.command(cls=Command)(command)

    def call(*args):
        seen.clear()
        result = CliRunner().invoke(app, list(args))
        return (seen[0] if seen else None), result

    return call


def test_fields_of_nested_settings_are_options_of_the_command(call):
    (settings, json_file), _ = call("run", "--users", "5", "--word", "a", "--word", "b", "--slow", "--json-file", "x")
    expected = Settings(Path("run"), Load(5, ("a", "b"), None), is_fast=False)
    assert (settings, json_file) == (expected, Path("x"))


@pytest.mark.parametrize(
    ("args", "port"),
    [
        (("run",), None),
        (("run", "--port"), 0),
        (("--port", "run"), 0),
        (("run", "--port", "80"), 80),
        (("run", "--port=80"), 80),
        (("--port", "80", "run"), 80),
        (("run", "--port", "--users", "5"), 0),
    ],
)
def test_the_number_of_some_options_may_be_left_out(call, args, port):
    (settings, _), _ = call(*args)
    assert (settings.run, settings.port) == (Path("run"), port)


def test_what_is_not_stated_keeps_the_default_of_its_field(call):
    (settings, _), _ = call("run")
    assert settings == Settings(Path("run"), Load())


@pytest.mark.parametrize("stated", [["--copies", "7"], ["--copies=7"]])
def test_an_old_name_counts_as_the_new_one_with_a_note(call, stated):
    (settings, _), result = call("run", *stated)
    assert settings.load.users == 7
    assert "--copies is now --users" in result.stderr


def test_help_shows_neither_rare_options_nor_old_names(call):
    _, result = call("--help")
    assert "--users" in result.stdout
    assert "--fast" not in result.stdout
    assert "--copies" not in result.stdout
    assert "--help-all" in result.stdout


def test_help_all_shows_every_option(call):
    _, result = call("--help-all")
    assert result.exit_code == 0
    assert "--fast" in result.stdout


def test_a_rare_option_works_without_being_shown(call):
    (settings, _), _ = call("run", "--fast")
    assert settings.is_fast is True


def test_the_help_of_an_option_is_the_text_of_its_field_in_the_docstring():
    texts = {each.name: (each.option.help, each.option.names) for each in settings_of(Documented)}
    assert texts == {
        "users": ("Users at once, of one level.", ("--many",)),
        "rate": ("Requests per second.", ("--rate",)),
    }


def test_settings_around_others_may_have_other_defaults():
    @dataclass(frozen=True, slots=True)
    class Around:
        load: Load = NINE

    assert [each.default for each in settings_of(Around)] == [9, (), None]
    assert filled(Around, {}) == Around(Load(users=9))


@dataclass(frozen=True, slots=True)
class Checked(Base):
    share: float = option("Share.", value=0.5, must="above 0 and at most 1")
    counts: tuple[int, ...] = option("Counts.", "--count", value=(), must="2 or more")
    way: str | None = option("Way.", one_of=("there", "back", "round"))
    rate: float | None = option("Rate.", must="at least 0 and below 1")

    def _check(self):
        if self.way == "back" and self.rate:
            raise InputError("--way back takes no --rate")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"share": 0.0}, "--share must be above 0 and at most 1, got 0"),
        ({"share": 1.5}, "--share must be above 0 and at most 1, got 1.5"),
        ({"share": float("nan")}, "--share must be above 0 and at most 1, got nan"),
        ({"counts": (2, 1)}, "--count must be 2 or more, got 1"),
        ({"way": "up"}, "--way up: use there, back or round"),
        ({"rate": -0.1}, "--rate must be at least 0 and below 1, got -0.1"),
        ({"rate": 1.0}, "--rate must be at least 0 and below 1, got 1"),
        ({"way": "back", "rate": 0.5}, "--way back takes no --rate"),
        ({"way": "back", "rate": 1.5}, "--rate must be"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused_when_settings_are_made(values, says):
    with pytest.raises(InputError, match=f"^{re.escape(says)}"):
        Checked(**values)


def test_values_at_the_ends_of_a_range_are_taken():
    assert Checked(share=1.0, counts=(2,), way="round", rate=0.0).share == 1.0
    assert Checked().rate is None


def test_an_option_of_the_command_itself_is_checked_too():
    app = typer.Typer()

    @spread_options
    def command(top: Annotated[int, Option("Rows.", must="at least 1")] = 3):
        raise AssertionError

    app.command(cls=Command)(command)
    found = CliRunner().invoke(app, ["--top", "0"]).exception
    assert str(found) == "--top must be at least 1, got 0"
