"""The site's navigation and links are complete, and its generated pages are those of today."""

from __future__ import annotations

import importlib.util
import re

import pytest
import typer
import yaml

from lmi_bench.cli.main import app
from lmi_bench.core.scenario import Scenario
from lmi_bench.core.scenario_sections import Section
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def hook():
    """docs/hooks/pages.py, which mkdocs loads by its path."""
    spec = importlib.util.spec_from_file_location("pages", DOCS / "hooks/pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = hook()


def places(nav):
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else places(value)


def slug(heading):
    """The anchor of a heading, as mkdocs and GitHub make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", words).strip())


def text_at(place):
    """A page as the site has it."""
    if place == PAGES.CLI_PAGE:
        return PAGES.cli_page()
    if place == PAGES.SCENARIO_PAGE:
        return PAGES.scenario_page()
    source = PAGES.copied_pages().get(place, DOCS / place)
    return PAGES.relinked(source.read_text("utf-8"), source, place)


def test_every_page_is_in_the_navigation_once_and_the_reverse():
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(places(SETTINGS["nav"])) == sorted(written | PAGES.generated_pages())


def test_every_link_and_anchor_of_the_site_leads_somewhere():
    pages = {place: text_at(place) for place in places(SETTINGS["nav"])}
    anchors = {place: {slug(each) for each in HEADING.findall(text)} for place, text in pages.items()}
    broken = []
    for place, text in pages.items():
        for link in LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`(?!\])", "", text, flags=re.M | re.S)):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (DOCS / place).parent.joinpath(path).resolve() if path else DOCS / place
            name = target.relative_to(DOCS).as_posix()
            found = anchors.get(name, set()) | {""} if target.suffix == ".md" else {anchor}
            is_there = name in anchors or target.is_file()
            broken += [] if is_there and anchor in found else [(place, link)]
    assert broken == []


def test_the_metrics_page_has_the_definitions_of_today():
    page = PAGES.METRICS_PAGE.read_text("utf-8")
    assert page == PAGES.with_tables(page), "write it anew: python docs/hooks/pages.py"


def test_the_command_lines_page_has_every_option_of_every_command():
    page = PAGES.cli_page()
    sections = dict(re.findall(r"^## lmi-bench ([^\n]*)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    commands = dict(PAGES._commands(typer.main.get_command(app)))
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        options = {each for param in command.params for each in param.opts if each[0] == "-"}
        assert {each for each in options if f"`{each}`" not in sections[name]} == set()
        assert command.help.splitlines()[0] in sections[name]


@pytest.mark.parametrize("key", ["extra_javascript", "extra_css", "repo_url"])
def test_the_site_loads_nothing_from_other_hosts(key):
    assert key not in SETTINGS
    assert SETTINGS["theme"]["font"] is False
    assert "analytics" not in SETTINGS.get("extra", {})


@pytest.mark.parametrize(
    ("html", "refused"),
    [
        ('<script src="https://unpkg.com/a.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ('<img alt="a" src="images/report.png"><a href="https://pytorch.org">', False),
    ],
)
def test_a_page_that_loads_from_another_host_ends_the_build(html, refused):
    class File:
        src_uri = "a.md"

    class Page:
        file = File

    if refused:
        with pytest.raises(ValueError, match=r"a\.md loads from another host: <"):
            PAGES.on_post_page(html, page=Page)
    else:
        assert PAGES.on_post_page(html, page=Page) == html


def test_the_scenario_page_has_every_field_with_its_option_and_default():
    page = PAGES.scenario_page()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    sections = (field.default for field in Scenario.model_fields.values())
    inner = {name for each in sections if isinstance(each, Section) for name in type(each).model_fields}
    outer = {name for name, field in Scenario.model_fields.items() if not isinstance(field.default, Section)}
    without_option = {"custom_attributes", "unrecorded"}
    assert inner | outer == {*rows} | without_option
    assert rows["ignore_eos"].startswith("| `ignore_eos` | `true` or `false` | `--ignore-eos/")
    assert rows["ignore_eos"].endswith("up to that end. (default: true) |")
    assert "| list: whole number or `auto` | `--concurrency` |" in rows["concurrency"]
