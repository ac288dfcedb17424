"""The map of the package, made from the files themselves.

    python -m benchmarks.package_map [FOLDER]     every file with the first line of its docstring
    python -m benchmarks.package_map --rooms      the packages and which imports which, as mermaid

An arrow that follows from others is left out: if `cli` imports `jobs` and `jobs` imports `core`,
`cli --> core` is not drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lmi_bench"


def files(folder: str = "") -> Iterator[tuple[str, str]]:
    """Every Python file below a folder of the package, with its first line; empty files apart."""
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            yield path.relative_to(PACKAGE).as_posix(), summary


def imports() -> set[tuple[str, str]]:
    """Pairs of top-level packages of which the first imports the second, at any depth."""
    found = set()
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room not in rooms:
            continue
        for module in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = module.split(".")
            if parts[0] == PACKAGE.name and len(parts) > 1 and parts[1] in rooms - {room}:
                found.add((room, parts[1]))
    return found


def arrows(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs that do not follow from others; cycles are not allowed.

    >>> arrows([("cli", "jobs"), ("jobs", "core"), ("cli", "core")])
    [('cli', 'jobs'), ('jobs', 'core')]
    """
    below: dict[str, set[str]] = {}
    for upper, lower in pairs:
        below.setdefault(upper, set()).add(lower)

    def reached(room: str) -> set[str]:
        return {far for near in below.get(room, ()) for far in {near} | reached(near)}

    return sorted(
        (upper, lower)
        for upper, lowers in below.items()
        for lower in lowers
        if not any(lower in reached(other) for other in lowers - {lower})
    )


def mermaid() -> str:
    """The packages as a mermaid flowchart, one line for each package and what it imports."""
    below: dict[str, list[str]] = {}
    for upper, lower in arrows(imports()):
        below.setdefault(upper, []).append(lower)
    lines = (f"    {upper} --> {' & '.join(lowers)}" for upper, lowers in below.items())
    return "\n".join(["flowchart TD", *lines])


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def main(arguments: list[str]) -> None:
    """Print the files or the packages."""
    if "--rooms" in arguments:
        lines = [mermaid()]
    else:
        lines = [f"{name:<52} {summary}" for name, summary in files(*arguments[:1])]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
