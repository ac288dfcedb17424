"""What an installation of lmi-bench consists of: an SBOM (CycloneDX 1.6), and the licences.

Both read the metadata of the packages that are installed beside it, from lmi-bench's own
requirements on. Nothing is fetched.

    python benchmarks/sbom.py --out sbom.json    every package, direct or not, with its version
    python benchmarks/sbom.py --extra engine     with those of an extra
    python benchmarks/sbom.py --licences         the table of docs/release.md
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS = ("engine", "parquet", "structured")
SHORT = {
    "OSI Approved :: Apache Software License": "Apache-2.0",
    "OSI Approved :: BSD License": "BSD",
    "OSI Approved :: MIT License": "MIT",
    "OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
"""Classifiers in the words of SPDX; a package with neither these nor an expression keeps its own
first line."""


def requirements(extra: str | None = None) -> list[Requirement]:
    """lmi-bench's own, or those of one of its extras, in the order of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def licence_of(package: metadata.Distribution) -> str:
    """The licence that a package states, as an SPDX expression if it gives one."""
    [expression] = package.metadata.get_all("License-Expression") or [""]
    if expression:
        return str(expression)
    classifiers = package.metadata.get_all("Classifier") or []
    found = [c.removeprefix("License :: ") for c in classifiers if c.startswith("License :: ")]
    [text] = package.metadata.get_all("License") or [""]
    stated = str(text).strip().partition("\n")[0]
    if stated and len(stated) <= 40:
        return str(stated)
    return " OR ".join(SHORT.get(each, each) for each in found) or "not stated"


def installed(extras: Sequence[str]) -> dict[str, metadata.Distribution]:
    """The packages that lmi-bench and these extras need, and those that they need, by name."""
    waiting = [each for extra in (None, *extras) for each in requirements(extra)]
    found: dict[str, metadata.Distribution] = {}
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker is not None and not wanted.marker.evaluate()):
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            sys.exit(f"{wanted} is not installed here: pip install it first")
        for text in found[name].requires or ():
            needed = Requirement(text)
            asked = wanted.extras or {""}
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in asked):
                waiting.append(Requirement(str(needed).partition(";")[0]))
    return dict(sorted(found.items()))


def bill(extras: Sequence[str]) -> dict[str, object]:
    """The SBOM as CycloneDX's JSON."""
    from lmi_bench import __version__

    packages = installed(extras)
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{package.version}",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version}",
            "licenses": [{"license": {"name": licence_of(package)}}],
        }
        for name, package in packages.items()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {
                "type": "application",
                "bom-ref": f"pkg:pypi/lmi-bench@{__version__}",
                "name": "lmi-bench",
                "version": __version__,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
    }


def licences() -> str:
    """The direct dependencies with their licences, as a Markdown table."""
    lines = ["| package | for | licence |", "|---|---|---|"]
    for extra in (None, *EXTRAS):
        for each in requirements(extra):
            of = "all commands" if extra is None else f"`[{extra}]`"
            licence = licence_of(metadata.distribution(each.name))
            lines.append(f"| {each.name} | {of} | {licence} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extra", action="append", choices=EXTRAS, default=[])
    parser.add_argument("--licences", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; none: stdout.")
    args = parser.parse_args()
    text = licences() if args.licences else json.dumps(bill(args.extra), indent=1)
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
