"""Writes docs/posts.md: every claim and table of the published posts beside what the program gives.

    python benchmarks/posts.py            run the commands and write the page
    python benchmarks/posts.py --check    run them and fail where the page is stale

A verdict is made here from the output of a command that stands beside it: "agrees" within a stated
tolerance or an 80 % interval, "differs because" of a physical or arithmetical reason, or "cannot be
shown without a GPU". A claim that differs without a reason stops the script. Random seeds are the
program's default, 0. Measured figures change from run to run: of them only the verdicts are
compared.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.support.accuracy_tables import SHARED  # noqa: E402
from benchmarks.support.posts_engines import BATCHING, CONTAINER, TOOLKIT  # noqa: E402
from benchmarks.support.posts_jumpstart import JUMPSTART  # noqa: E402
from benchmarks.support.posts_program import AGREES, DIFFERS, NEEDS_GPU, Claim, Program, by_id, one_of, shown  # noqa: E402
from benchmarks.support.posts_tables import FALCON_USERS, command, falcon, jumpstart  # noqa: E402

PAGE = ROOT / "docs" / "posts.md"
POSTS = (
    ("The inference optimization toolkit (2024)", TOOLKIT),
    ("LMI containers 0.26 (2024)", CONTAINER),
    ("Benchmarks of JumpStart's endpoints (2024)", JUMPSTART),
    ("Continuous batching in LMI containers (2023)", BATCHING),
)
CLAIMS = by_id([claim for _, claims in POSTS for claim in claims])
TABLES = (
    ("Throughput and latency by load", "jumpstart_concurrency.csv"),
    ("Least latency", "jumpstart_min_latency.csv"),
    ("Highest throughput", "jumpstart_max_throughput.csv"),
)
_TURNS = 3
_MIXED = (
    "sweep scenarios/mixed-20-500.yaml --target engine --model demo-15m --backend native "
    "--concurrency 8 --requests-per-user 3"
)
_WAYS = {"dynamic, 4": "--policy dynamic --batch-size 4", "rolling": "--policy rolling"}
_NUMBER = re.compile(r"\d[\d,]*\.?\d*")
_SAME = 0.02  # relative difference of numbers that a page of this tree may have


def claim_lines(program: Program, claims: tuple[Claim, ...]) -> list[str]:
    lines = ["| | claim | figure | here | verdict |", "|---|---|---|---|---|"]
    for claim in claims:
        text, verdict = (each.replace("|", "/") for each in claim.verdict(program))
        lines.append(f"| {claim.id} | {claim.said} | {claim.figure} | {claim.how}: {text} | {verdict} |")
    lines += ["", "Commands:", ""]
    for commands in dict.fromkeys(claim.shows for claim in claims):
        ids = ", ".join(claim.id for claim in claims if claim.shows == commands)
        lines.append(f"- {ids}: " + "; ".join(f"`{shown(each)}`" for each in commands))
    return lines


def table_lines(program: Program, name: str) -> list[str]:
    cells = jumpstart(program, name)
    counts = Counter((cell.is_fitted, one_of(cell.verdict)) for cell in cells)
    lines = [f"`{shown(command(name))}`", ""]
    for is_fitted, words in ((True, "that the profile may have seen"), (False, "kept out of fits")):
        agreeing = counts[is_fitted, AGREES]
        total = agreeing + counts[is_fitted, DIFFERS]
        lines += [f"Of {total} figures {words}, {agreeing} agree. " if total else ""]
    lines += ["", "| set-up | published | predicted (80 %) | fit | verdict |", "|---|---|---|---|---|"]
    lines += [
        f"| {cell.where} | {cell.published} | {cell.given} | {'yes' if cell.is_fitted else 'no'} | {cell.verdict} |"
        for cell in cells
    ]
    return lines


def falcon_lines(program: Program) -> list[str]:
    lines = [
        f"The post states no load: {FALCON_USERS} users are simulated, which fill every batch. "
        "Ratios are to dynamic batching of the same requests.",
        "",
        "| in / out | batching | published tok/s, p90 s | ratio | simulated tok/s, p90 s | ratio | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    commands, base = [], {}
    for row, text, speed, p90_s in falcon(program):
        commands.append(text)
        claimed = float(row["throughput_tokens_per_s"])
        first, here = base.setdefault(row["scenario"], (claimed, speed))
        ratio, mine = claimed / first, speed / here
        if abs(mine / ratio - 1) <= 0.15:
            verdict = f"{AGREES} (ratio within 15 %)" if ratio > 1 else f"{AGREES} (the base)"
        else:
            verdict = f"{DIFFERS} {CLAIMS['F01'].why}"
        lines.append(
            f"| {row['input_tokens']} / {row['output_tokens']} | {row['batching_strategy']} "
            f"| {claimed:g}, {float(row['latency_p90_s']):g} | {ratio:.2f} "
            f"| {speed:.1f}, {p90_s:.1f} | {mine:.2f} | {verdict} |"
        )
    return [*lines, "", "Commands:", "", *(f"- `{shown(each)}`" for each in commands)]


def measured_lines(program: Program) -> list[str]:
    """Both ways of batching on the bundled engine, in turns, so that drift hits all alike."""
    speeds: dict[str, list[float]] = {name: [] for name in _WAYS}
    for _ in range(_TURNS):
        for name, options in _WAYS.items():
            out = program.again(f"{_MIXED} {options}")
            speeds[name] += out.levels("throughput_tokens_per_s").values()
    lines = ["| batching | tok/s, each turn | over dynamic, each turn | median | verdict |"]
    lines += ["|---|---|---|---|---|"]
    for name, own in speeds.items():
        ratios = [a / b for a, b in zip(own, speeds["dynamic, 4"], strict=True)]
        verdict = f"{DIFFERS} of other load on this machine: the turns disagree"
        if name == "dynamic, 4" or min(ratios) > 1:
            verdict = "the base" if name == "dynamic, 4" else f"{AGREES} (faster in every turn)"
        lines.append(
            f"| {name} | {', '.join(f'{v:,.0f}' for v in own)} "
            f"| {', '.join(f'{r:.2f}' for r in ratios)} | {statistics.median(ratios):.2f} "
            f"| {verdict} |"
        )
    return [*lines, "", *(f"- `{shown(f'{_MIXED} {options}')}`" for options in _WAYS.values())]


def page(program: Program) -> str:
    started_s = time.monotonic()
    sections = []
    for title, claims in POSTS:
        print(title)
        sections += [f"## {title}", "", *claim_lines(program, claims), ""]
    for title, name in TABLES:
        print(title)
        sections += [f"## Table: {title.lower()}", "", *table_lines(program, name), ""]
    print("Falcon-40B, and measured batching")
    sections += ["## Table: three ways of batching Falcon-40B", "", *falcon_lines(program), ""]
    sections += ["## Two ways of batching, measured here", ""]
    sections += [
        "The bundled engine on this machine's CPU, demo-15m, 8 users, half the requests 20 / 500 "
        f"and half 500 / 20 tokens, {_TURNS} turns.",
        "",
        *measured_lines(program),
    ]
    rows = [line for line in sections if re.match(r"\| [TMJF]\d\d \|", line)]
    counts = Counter(one_of(line.split(" | ")[4]) for line in rows)
    minutes = (time.monotonic() - started_s) / 60
    head = [
        "# The posts, shown",
        "",
        f"The {len(CLAIMS)} claims and four tables of the published posts that this program was "
        "written to, each beside what it computes, predicts, simulates or measures. Written by "
        f"`python benchmarks/posts.py` in {minutes:.0f} minutes; seed 0 throughout. Verdicts come "
        "from the outputs of the commands, which each section lists.",
        "",
        f"Claims: {counts[AGREES]} agree, {counts[DIFFERS]} differ for a stated reason, "
        f"{counts[NEEDS_GPU]} cannot be shown without a GPU.",
        "",
    ]
    return "\n".join([*head, *sections]).rstrip("\n") + "\n"


def stale(old: str, new: str) -> list[str]:
    """The lines of a page that a new one contradicts: words, verdicts, numbers by over 2 %."""
    before, after = old.splitlines()[4:], new.splitlines()[4:]
    if len(before) != len(after):
        return [f"{len(before)} lines, and {len(after)} anew"]
    measured = after.index("## Two ways of batching, measured here")
    return [
        f"- {a}\n+ {b}"
        for number, (a, b) in enumerate(zip(before, after, strict=True))
        if not _same(a, b, number > measured or "| measured: " in b)
    ]


def _same(old: str, new: str, is_measured: bool) -> bool:
    if is_measured:
        return old.split(" (")[0].rpartition("|")[2] == new.split(" (")[0].rpartition("|")[2] or (
            _kinds(old) == _kinds(new)
        )
    if _NUMBER.sub("#", old) != _NUMBER.sub("#", new):
        return False
    pairs = zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True)
    values = [tuple(float(text.replace(",", "").rstrip(".")) for text in pair) for pair in pairs]
    return all(abs(a - b) <= _SAME * max(a, b, 1) for a, b in values)


def _kinds(line: str) -> list[str]:
    return [kind for kind in (AGREES, DIFFERS, NEEDS_GPU) if kind in line]


def check_figures() -> None:
    """Where the list of the posts' claims is at hand, ids and figures are held against it."""
    path = SHARED / "published" / "post_claims.csv"
    if not path.exists():
        print("the list of claims is not at hand: figures are not compared with it")
        return
    rows = {row["claim_id"]: row for row in csv.DictReader(path.open(encoding="utf-8"))}
    if set(rows) != set(CLAIMS):
        raise SystemExit(f"claims differ from the list: {sorted(set(rows) ^ set(CLAIMS))}")
    for name, row in rows.items():
        said = [n.replace(",", "").rstrip(".") for n in _NUMBER.findall(CLAIMS[name].figure)]
        for wanted in _NUMBER.findall(row["value"]) if row["kind"] != "formula" else []:
            if wanted not in said:
                raise SystemExit(f"{name}: the list has {row['value']}, not {CLAIMS[name].figure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where the page is stale")
    given = parser.parse_args()
    check_figures()
    with tempfile.TemporaryDirectory() as folder:
        text = page(Program(Path(folder)))
    if not given.check:
        PAGE.write_text(text, encoding="utf-8")
        print(text.splitlines()[4], f"-> {PAGE}", sep="\n")
        return
    problems = stale(PAGE.read_text(encoding="utf-8"), text)
    print("\n".join(problems) or "the page is what the program gives")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
