"""Pages of the site that nobody writes: commands, scenario files, the README as start, results.

mkdocs calls the `on_` functions. The tests call `cli_page`, `scenario_page` and `metrics_tables`,
so none of it needs mkdocs before a build.

    python docs/hooks/pages.py      writes the tables of docs/reference/metrics.md anew
"""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CLI_PAGE, SCENARIO_PAGE = "reference/cli.md", "reference/scenario.md"
METRICS_PAGE = DOCS / "reference/metrics.md"
DEFINITIONS = ROOT / "lmi_bench/analysis/results/data/definitions.csv"
TABLE = re.compile(r"(?<=<!-- definitions -->\n).*?(?=<!-- end -->)", re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
TYPE = re.compile(r"<(?:list\[)?(\w+)\]?>")
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def copied_pages() -> dict[str, Path]:
    """Pages that lie outside docs/, by their place in the site."""
    results = sorted((ROOT / "benchmarks/results").glob("*.md"))
    return {
        "index.md": ROOT / "README.md",
        "changelog.md": ROOT / "CHANGELOG.md",
        "contributing.md": ROOT / "CONTRIBUTING.md",
    } | {f"measured/{path.name}": path for path in results}


def generated_pages() -> set[str]:
    """The places of all pages that are not files of docs/."""
    return {CLI_PAGE, SCENARIO_PAGE, *copied_pages()}


def relinked(text: str, source: Path, place: str) -> str:
    """The text with its links as they lead from `place` in the site.

    A link to a file that is no page of the site loses its target and keeps its words.
    """
    places = {path: name for name, path in copied_pages().items()}

    def change(match: re.Match[str]) -> str:
        mark, words, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if "://" in link or not path:
            return match[0]
        target = (source.parent / path).resolve()
        if target.is_relative_to(DOCS) and target.is_file():
            name = target.relative_to(DOCS).as_posix()
        elif target in places:
            name = places[target]
        else:
            return words
        up = "../" * place.count("/")
        return f"{mark}[{words}]({up}{name}{hash_}{anchor})"

    return LINK.sub(change, text)


def metrics_tables() -> str:
    """A section for each metric: unit, formula, what to know, its name in vLLM's benchmark."""
    with DEFINITIONS.open(encoding="utf-8", newline="") as file:
        return "\n".join(_metric(row) for row in csv.DictReader(file))


def _metric(row: dict[str, str]) -> str:
    unit = f", {row['unit']}" if row["unit"] else ""
    lines = [f"### {row['title']}{unit}", "", f"`{row['key']}` = {row['formula']}", ""]
    if row["note"]:
        lines += [f"{row['note'][0].upper()}{row['note'][1:]}.", ""]
    if row["vllm_key"]:
        key, _, where = row["vllm_key"].partition(" ")
        lines += [f"In `vllm bench serve`: `{key}` {where}".rstrip() + ".", ""]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The metrics page with its tables as the definitions say today."""
    return TABLE.sub(lambda _: f"\n{metrics_tables()}\n", page)


def cli_page() -> str:
    """Every command with all its options, as the program itself declares them."""
    import typer

    from lmi_bench.cli.main import app

    parts = [
        "# Command line",
        "",
        "This page is made from the commands of this version. `lmi-bench COMMAND --help` shows the",
        "usual options of a command, `--help-all` shows all of them. An option marked *rare* is",
        "shown by `--help-all` only.",
        "",
    ]
    root = typer.main.get_command(app)
    parts += [f"- [`lmi-bench {name}`](#lmi-bench-{name.replace(' ', '-')})" for name, _ in _commands(root)]
    for name, command in _commands(root):
        parts += ["", *_section(name, command)]
    return "\n".join(parts) + "\n"


def scenario_page() -> str:
    """Every field of a scenario file, as the sections declare it: value, option, meaning."""
    from lmi_bench.core.scenario import Scenario
    from lmi_bench.core.scenario_fields import Fields

    lines = [
        "# Scenario file",
        "",
        "A scenario states what `lmi-bench sweep FILE.yaml` measures, and what",
        "`lmi-bench recommend --workload FILE.yaml` plans for. Every field may be left out.",
        "An option of `sweep` overrides the field of the file.",
    ]
    groups: dict[str, list[Any]] = {}
    for group in Fields.__subclasses__():
        groups.setdefault(group.SECTION, []).append(group)
    for section, members in groups.items():
        model: Any = Scenario.model_fields[section].annotation if section else Scenario
        lines += ["", f"## {section}" if section else "## At the top"]
        for group in members:
            lines += ["", *_prose(group), "| field | value | option | is |", "|---|---|---|---|"]
            lines += _fields(group, model.model_fields)
    return "\n".join(lines) + "\n"


def _fields(group: Any, known: Any) -> Iterator[str]:
    from lmi_bench.core.option import Stated

    for each in Stated(group).settings():
        name, mark = each.place.rpartition(".")[2], each.option
        default = known[name].default
        usual = default if isinstance(default, str) and default else mark.default
        usual = str(default).lower() if isinstance(default, bool) else usual
        note = f" (default: {usual})" if usual else ""
        option = mark.name_of(each.name)
        row = (f"`{name}`", _value(known[name].annotation), f"`{option}`", f"{mark.help}{note}")
        yield f"| {' | '.join(map(_cell, row))} |"


def _prose(group: type[Any]) -> list[str]:
    """The paragraphs of a docstring, without its table of fields."""
    paragraphs = inspect.cleandoc(group.__doc__ or "").split("\n\n")
    prose = (" ".join(each.split()) for each in paragraphs if not re.match(r"\w+  +\S", each))
    return [line for text in prose for line in (text, "")]


def _value(hint: Any) -> str:
    """What may be written for a field of this type."""
    origin, parts = get_origin(hint), [each for each in get_args(hint) if each is not NoneType]
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in parts)
    if origin is tuple:
        return f"list: {_value(parts[0])}"
    if hasattr(hint, "model_fields"):
        return f"{{{', '.join(hint.model_fields)}}}"
    if parts:
        return " or ".join(map(_value, parts[:1] if origin is Annotated else parts))
    names = {int: "whole number", float: "number", bool: "`true` or `false`"}
    return names.get(hint, "text")


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        full = f"{above} {name}".strip()
        if hasattr(command, "commands"):
            yield from _commands(command, full)
        else:
            yield full, command


def _section(name: str, command: Any) -> list[str]:
    import typer

    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = " ".join(_usage(each) for each in arguments)
    lines = [f"## lmi-bench {name}", "", "```text", f"lmi-bench {name} [OPTIONS] {words}".rstrip(), "```", ""]
    lines += [command.help or "", ""]
    ctx = typer.Context(command)
    panels: dict[str, list[str]] = {}
    rare = getattr(command.callback, "rare", frozenset())
    for each in command.params:
        panel = getattr(each, "rich_help_panel", None) or ("Arguments" if each in arguments else "Options")
        panels.setdefault(panel, []).append(_option(each, each.name in rare, ctx))
    for panel, rows in panels.items():
        lines += [f"**{panel}**", "", "| option | is |", "|---|---|", *rows, ""]
    return lines


def _usage(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()) + ("..." if argument.nargs == -1 else "")
    return word if argument.required or word.startswith("[") else f"[{word}]"


def _option(param: Any, is_rare: bool, ctx: Any) -> str:
    if param.param_type_name == "argument":
        name = f"`{_usage(param)}`"
    else:
        name = ", ".join(f"`{each}`" for each in (*param.opts, *param.secondary_opts))
        if not param.is_flag:
            kind = TYPE.sub(r"\1", param.display_type(ctx)).upper()
            name += f" {kind}"
    notes = ["required" if param.required else "", "rare" if is_rare else ""]
    notes += [f"or the variable {param.envvar}" if param.envvar else ""]
    help_ = " ".join((param.help or "").split())
    shown = "; ".join(note for note in notes if note)
    return f"| {_cell(name)} | {_cell(help_)}{f' *({shown})*' if shown else ''} |"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text).replace("<", "&lt;").replace("*", "\\*")


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    for place, path in copied_pages().items():
        text = relinked(path.read_text("utf-8"), path, place)
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, CLI_PAGE, content=cli_page()))
    files.append(File.generated(config, SCENARIO_PAGE, content=scenario_page()))
    return files


def on_page_markdown(text: str, *, page: Any, **_: Any) -> str:
    """Links to results and other files outside docs/ lead to their place in the site."""
    place = page.file.src_uri
    return text if place in generated_pages() else relinked(text, DOCS / place, place)


def on_post_page(html: str, *, page: Any, **_: Any) -> str:
    """Refuses a page that loads anything from another host."""
    if found := LOADED.search(html):
        raise ValueError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return html


if __name__ == "__main__":
    METRICS_PAGE.write_text(with_tables(METRICS_PAGE.read_text("utf-8")), "utf-8")
