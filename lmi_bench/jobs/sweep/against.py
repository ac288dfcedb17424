"""Two targets in turn: levels alternate between both until a difference is sure.

What drifts in time, such as a machine's temperature or other tenants, meets both sides, and each
round is one independent pair. The two run folders are ordinary runs, which resume by themselves.
"""

import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.results.repeats import LOOKS, MAX_ATTEMPTS, PairedChange, paired_changes, parse_until
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.jobs.settings.sweep import SweepSettings
from lmi_bench.jobs.sweep.result import SweepResult
from lmi_bench.jobs.sweep.run import only, read_options, read_scenario, refuse_without_effect, sweep_scenario
from lmi_bench.targets.bench import Access

KEY_OF_B = "LMI_BENCH_API_KEY_B"
DEFAULT_UNTIL = {"closed": "throughput +-3%", "open": "e2e_p50 +-3%"}


@dataclass(frozen=True, slots=True)
class Contest:
    """The runs of both targets, and what their rounds show, level by level.

    changes  of B against A; empty if it was interrupted before the first round ended
    """

    sides: Sequence[SweepResult]
    changes: Sequence[PairedChange] = ()
    slo_outcome = None

    def to_json(self) -> dict[str, Any]:
        """Run folders and changes (logarithms of B / A) as plain values."""
        changes = [{**asdict(each), "verdict": each.verdict} for each in self.changes]
        return {"runs": [str(side.folder) for side in self.sides], "changes": changes}

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM ended it."""
        return any(side.interrupted for side in self.sides)

    @property
    def failed(self) -> bool:
        """Whether a side measured nothing."""
        return any(side.failed for side in self.sides)


def sweep_against(settings: SweepSettings, listener: Listener = SILENT) -> Contest:
    """Run both targets in turn into `a` and `b` of the run folder; raises InputError before
    anything is sent."""
    stated, out, options = settings.target, settings.run.out, read_options(settings)
    if out is None or stated.matrix is not None or options.live is not None or options.startup:
        raise InputError("--against needs --out, and no --matrix, --live or --measure-startup")
    scenario = read_scenario(stated.scenario, settings.overrides())
    limited = options.max_time or options.budget.max_usd or options.slo.limits
    if scenario.slo or limited:
        raise InputError(
            "--against finds differences: it takes no --slo and --goodput, and has its own end in "
            "place of --max-time and --max-spend"
        )
    if scenario.load.is_adaptive or scenario.load.repeat > 1:
        raise InputError("--against needs listed levels, and states the repeats itself")
    kind = "open" if scenario.load.rate_per_s else "closed"
    until = parse_until(scenario.load.until or DEFAULT_UNTIL[kind])
    own = scenario.model_copy(update={"load": scenario.load.model_copy(update={"until": None})})
    own = own.with_overrides({"load.repeat": MAX_ATTEMPTS})
    sides = {out / "a": own, out / "b": own.with_overrides({"target": stated.against})}
    refuse_without_effect(settings, *sides.values())
    if not settings.run.resume and any(map(Path.exists, sides)):
        raise InputError(f"{out} exists: name another folder with --out, or --resume")
    hosts = [urllib.parse.urlsplit(side.target).netloc for side in sides.values()]
    of_b = replace(options, client=replace(options.client, metrics_urls=()))
    if hosts[0] != hosts[1]:  # another host is given no key but its own
        of_b = replace(of_b, access=Access(os.environ.get(KEY_OF_B)))
    contest = Contest(())
    for rounds in range(1, MAX_ATTEMPTS + 1):
        # what the first round has noted is not said again
        heard = listener if rounds == 1 else only(listener, "warn", "progress")
        order = sorted(sides, reverse=rounds % 2 == 0)  # A B, B A: neither is always the second
        found: dict[Path, SweepResult] = {}
        for folder in order:
            here = replace(options if folder.name == "a" else of_b, rounds=rounds)
            found[folder] = sweep_scenario(sides[folder], here, heard, out=folder, resume=True)
            if found[folder].interrupted or found[folder].failed:
                return replace(contest, sides=list(found.values()))
        results = [found[folder] for folder in sides]
        a, b = (side.levels for side in results)
        contest = Contest(results, paired_changes(a, b, until))
        if rounds in LOOKS:
            listener.note(f"round {rounds}: {'; '.join(map(str, contest.changes))}")
            if contest.changes and all(change.verdict for change in contest.changes):
                break
    return contest
