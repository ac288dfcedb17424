"""What the documents name exists, and what exists is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.package_map import files, mermaid

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lmi_bench"
PATH = re.compile(r"(?<![\w/.])((?:lmi_bench/)?[a-z_]+(?:/[a-z_]+)*\.py)\b")


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page):
    named = PATH.findall(page.read_text(encoding="utf-8"))
    missing = [
        name
        for name in named
        if name != "model.py"  # the handler that a model folder of LMI may hold
        and not (PACKAGE / name.removeprefix("lmi_bench/")).is_file()
        and not (ROOT / name).is_file()
        and not any(PACKAGE.rglob(name))
        and not any((ROOT / "tests").rglob(name))
    ]
    assert missing == []


def test_the_picture_of_the_packages_is_drawn_from_the_imports():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert mermaid() in text


def test_the_architecture_page_is_short_and_names_every_package():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert [name for name in folders if f"`{name}`" not in text] == []
    assert len(text.splitlines()) <= 80


def test_every_file_says_in_its_first_line_what_it_is():
    unsaid = [name for name, summary in files() if not (10 <= len(summary) <= 100 and summary[-1] in ".:?")]
    assert unsaid == []


def test_every_feature_row_is_listed_once_and_in_order():
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs/features.md").read_text("utf-8"), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 226))


def test_constraints_pin_plain_releases_only():
    """No local builds, no files, no addresses: they would not install on another machine."""
    lines = [
        line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    assert "torch==2.13.0" in lines
    plain = re.compile(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*")
    assert [line for line in lines if not plain.fullmatch(line)] == []


def test_links_between_pages_lead_somewhere():
    broken = [
        (page.name, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_test_that_a_feature_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/features.md").read_text("utf-8"))
    missing = [
        (path, name)
        for path, name in named
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text("utf-8"))
    ]
    assert named
    assert missing == []
