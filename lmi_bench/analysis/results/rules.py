"""Whether a run would count under the public rules of a benchmark.

AgentX (SemiAnalysis InferenceX, as AIPerf's scenario `inferencex-agentx-mvp` locks it): recorded
sessions of Weka's corpus in a closed loop at one concurrency, each begun within, with a primed
cache; waits from the end of an answer, gaps between starts cut to 10 s; whole answers, streamed;
other text in each play; at least 15 minutes, and at most 1 % failed requests.
"""

from typing import Final

from lmi_bench.analysis.results.gate import GateCase
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import Run

RULES: Final = ("agentx",)
_IDLE_CAP_S, _LEAST_S, _MOST_FAILED = 10.0, 900.0, 0.01


def gate_rules(run: Run, name: str) -> list[GateCase]:
    """One case for each rule; raises InputError for an unknown name."""
    if name not in RULES:
        raise InputError(f"--rules {name!r} is not known; write {', '.join(RULES)}")
    scenario, workload = run.manifest.scenario, run.manifest.scenario.workload
    loads = {line.load.value for line in run.levels}
    closed = bool(run.levels) and not any(line.load.is_open for line in run.levels)
    facts = [
        ("sessions", workload.agent_trace is not None, "recorded ones: --agent-trace"),
        ("load", closed and len(loads) == 1, "one --concurrency"),
        ("begin", workload.begins_within, "--begin-within"),
        ("idle gaps", workload.idle_cap_s == _IDLE_CAP_S, f"--idle-cap {_IDLE_CAP_S:g}"),
        ("answers", workload.ignore_eos and scenario.stream, "streamed, and as long as recorded"),
        ("prompts", not workload.reuse_prompts, "--fresh-prompts"),
        ("target", not run.manifest.target.is_simulated, "a server that was measured"),
    ]
    cases = [
        _case("run", name, "yes" if holds else "no", holds, rule) for name, holds, rule in facts
    ]
    for line in run.levels:
        failed, wall_s = (line.errors or 0) / max(1, line.requests or 0), line.wall_s or 0.0
        limit = f"at most {_MOST_FAILED:.0%}"
        cases += [
            _case(line.name, "duration", f"{wall_s:.0f} s", wall_s >= _LEAST_S, f"{_LEAST_S:g} s"),
            _case(line.name, "failed", f"{failed:.1%}", failed <= _MOST_FAILED, limit),
            _case(line.name, "valid", "yes" if line.valid else "no", line.valid, "yes"),
        ]
    return cases


def _case(level: str, name: str, measured: str, holds: bool, rule: str) -> GateCase:
    detail = "" if holds else f"the rules ask for {rule}"
    return GateCase(level, name, measured, rule, "passed" if holds else "missed", detail)
