"""The help of every command: few options at once, each with its default in one form."""

from __future__ import annotations

import re

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from lmi_bench.cli.main import app


def commands(group, *names):
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, *names, name)
        else:
            yield (*names, name)


COMMANDS = list(commands(typer.main.get_command(app)))
FEW = 40


def shown(*command, columns=200):
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(command))
    assert result.exit_code == 0
    return result.output


def options(text):
    return re.findall(r"^│ +\*? *(--[a-z][\w-]*…?)", text, re.M)


def headings(text):
    return re.findall(r"^.─ ([A-Z][\w: ]+) ─", text, re.M)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_plain_help_lists_at_most_forty_options_and_each_default_in_one_form(command):
    text = shown(*command, "--help")
    assert len(options(text)) <= FEW
    assert len(headings(text)) <= 10
    assert "[default" not in text  # Typer's own form, which puts words in parentheses
    assert "(default: (" not in text


@pytest.mark.parametrize("command", [("sweep",), ("serve",), ("generate",), ("compile",), ("recommend",)], ids=" ".join)
def test_the_rest_is_under_help_all(command):
    few, all_ = options(shown(*command, "--help")), options(shown(*command, "--help-all"))
    assert set(few) < set(all_)
    assert f"{len(all_) - len(few)} more options: --help-all" in shown(*command, "--help")


def test_sweep_has_a_hundred_options_in_groups_of_what_they_say():
    few, all_ = shown("sweep", "--help"), shown("sweep", "--help-all")
    assert len(options(all_)) > 90
    assert headings(few) == [
        *("Arguments", "Options", "Target", "Workload", "Conversations", "Load", "Limits", "Run"),
        *("Engine: model", "Engine: batching"),
    ]


@pytest.mark.parametrize("command", [("serve",), ("sweep",), ("deploy", "write")], ids=" ".join)
def test_no_name_is_cut_off_in_80_columns(command):
    assert [name for name in options(shown(*command, "--help", columns=80)) if "…" in name] == []


def test_a_text_is_folded_at_the_width_of_the_terminal_alone():
    """A docstring is folded at 100 columns; its line ends are no ends of paragraphs."""
    lines = shown("serve", "--help", columns=120).splitlines()
    start = next(n for n, line in enumerate(lines) if "With --executor simulated" in line)
    assert len(lines[start].strip()) > 100
