"""A gate's verdict as JUnit XML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from lmi_bench.analysis.results.gate import GateCase


def gate_junit(cases: Sequence[GateCase], *, suite: str = "lmi-bench gate") -> str:
    """JUnit XML: one test case per check, with the level as its class."""
    failures = sum(not case.passed for case in cases)
    root = Element("testsuites", tests=str(len(cases)), failures=str(failures))
    group = SubElement(
        root, "testsuite", name=suite, tests=str(len(cases)), failures=str(failures), errors="0"
    )
    for case in cases:
        entry = SubElement(group, "testcase", classname=case.level, name=case.name)
        if not case.passed:
            text = SubElement(entry, "failure", message=case.detail)
            text.text = f"{case.name} at {case.level}: {case.measured}, limit {case.limit}"
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def gate_markdown(cases: Sequence[GateCase], *, title: str) -> str:
    """A line with the verdict, and a table of the checks, misses first."""
    missed = [case for case in cases if not case.passed]
    verdict = f"{len(missed)} of {len(cases)} checks missed" if missed else "all checks passed"
    lines = [f"## {title}: {verdict}", "", "| | level | check | measured | limit | |",
             "|---|---|---|---:|---:|---|"]  # fmt: skip
    lines += [
        f"| {'✓' if case.passed else '✗'} | {case.level} | {case.name} | {case.measured} | "
        f"{case.limit} | {_cell(case.detail)} |"
        for case in sorted(cases, key=lambda case: case.passed)
    ]
    return "\n".join(lines) + "\n"


def gate_rows(cases: Sequence[GateCase]) -> list[dict[str, str]]:
    """Rows for the console."""
    return [
        {
            "": "ok" if case.passed else "MISS",
            "level": case.level,
            "check": case.name,
            "measured": case.measured,
            "limit": case.limit,
            "why": case.detail,
        }
        for case in cases
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
