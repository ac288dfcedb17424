"""The commands that a page shows, and what it prints below them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}\S.*\n?)+", re.MULTILINE)
TITLE = re.compile(r'title="([^"]*)"')
VARIES = "yours differ"  # in the title of a block whose figures are of one machine


@dataclass(frozen=True)
class Step:
    """A command as typed, and the lines that the page shows below it."""

    line: str
    shown: tuple[str, ...]
    varies: bool

    @property
    def words(self) -> list[str]:
        """The words of the command."""
        return shlex.split(self.line)


def steps(page: str) -> list[Step]:
    """The commands of the `console` blocks of a page, in order."""
    found = []
    for language, info, body in FENCE.findall(page):
        if language == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, shown = part.replace("\\\n", " ").partition("\n")
                found.append(Step(line.strip(), tuple(shown.splitlines()), VARIES in info))
    return found


def titled_files(page: str) -> dict[str, str]:
    """The blocks of a page that are files, by their name."""
    return {
        TITLE.search(info)[1]: body
        for language, info, body in FENCE.findall(page)
        if TITLE.search(info) and language != "console"
    }


def command_lines(page: str) -> list[str]:
    """Every command of lmi-bench in the code blocks of a page, in one line, without comments."""
    blocks = [body for _, _, body in FENCE.findall(page)]
    blocks += INDENTED.findall(FENCE.sub("", page))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    bare = (re.sub(r"(\s+#\s.*|\s*&)$", "", line.strip().removeprefix("$ ")) for line in lines)
    return [line for line in bare if re.match(r"lmi-bench [a-z]", line)]
