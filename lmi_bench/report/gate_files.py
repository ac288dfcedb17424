"""A gate's verdict as JUnit XML and Markdown."""

from collections import Counter
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from lmi_bench.analysis.results.gate import GateCase

_CELL = str.maketrans({"|": "\\|", "\n": " "})
_MARK = {"missed": "✗", "not measured": "?", "passed": "✓"}


def gate_junit(cases: Sequence[GateCase]) -> str:
    """JUnit XML: one test case per check, with the level as its class; not measured: skipped."""
    found = Counter(case.outcome for case in cases)
    name, counts = "lmi-bench gate", {"tests": str(len(cases)), "failures": str(found["missed"])}
    root = Element("testsuites", counts)
    skipped = str(found["not measured"])
    group = SubElement(root, "testsuite", counts, name=name, errors="0", skipped=skipped)
    for case in cases:
        entry = SubElement(group, "testcase", classname=case.level, name=case.name)
        if case.outcome == "not measured":
            SubElement(entry, "skipped", message=case.detail)
        elif case.outcome == "missed":
            text = SubElement(entry, "failure", message=case.detail)
            text.text = f"{case.name} at {case.level}: {case.measured}, limit {case.limit}"
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def gate_markdown(cases: Sequence[GateCase], *, title: str) -> str:
    """A line with the verdict, and a table of the checks, misses first."""
    lines = [
        f"## {title}: {gate_summary(cases)}",
        "",
        "| | level | check | measured | limit | |",
        "|---|---|---|---:|---:|---|",
    ]
    lines += [
        f"| {_MARK[case.outcome]} | {case.level} | {case.name} | {case.measured} | "
        f"{case.limit} | {case.detail.translate(_CELL)} |"
        for case in sorted(cases, key=lambda case: list(_MARK).index(case.outcome))
    ]
    return "\n".join(lines) + "\n"


def gate_summary(cases: Sequence[GateCase]) -> str:
    """The verdict in words: `2 of 12 checks missed, 3 not measured`."""
    found = Counter(case.outcome for case in cases)
    missed = f"{found['missed']} of {len(cases)} checks missed" if found["missed"] else ""
    unknown = f"{found['not measured']} not measured" if found["not measured"] else ""
    return ", ".join(filter(None, (missed, unknown))) or "all checks passed"


def gate_rows(cases: Sequence[GateCase]) -> list[dict[str, str]]:
    """Rows for the console."""
    words = {"passed": "ok", "missed": "MISS", "not measured": "?"}
    return [
        {
            "": words[case.outcome],
            "level": case.level,
            "check": case.name,
            "measured": case.measured,
            "limit": case.limit,
            "why": case.detail,
        }
        for case in cases
    ]
