"""Self-consistency of decisions in hidden worlds: is the SLO kept, what did it cost too much?

    python benchmarks/decision_audit.py --worlds 200 --out benchmarks/results/decision_audit.md

It runs on all cores, or with `--ray ADDRESS` on a cluster; with `--keep FOLDER` it goes on behind
the worlds that it has.

The worlds are of the planner's own class of models, so this audits the measuring and the rule of
choice, not the model: for that, published_decisions.py has measured worlds.

A world draws its machines (bandwidth, compute, memory, link, price), its engine's constants from
wide ranges, a load and two SLOs. Every second world also has effects that the planner's model
lacks: stalls, another limit on the batch, host time that grows faster than the batch, cached
prefixes. The planner sees data sheets and prices and may measure eight cells: closed loops of 1 and
24 users on the two layouts that look best before anything is known, then, one by one, the level of
random arrivals on one copy that it names itself (`measure_next`). Its fleet is then run.

The world steps the engine's scheduler in virtual time (the simulator), each copy under its share of
the Poisson load, with draws that the planner has not seen. Beside it stand a planner that takes the
cheapest machine that holds the model, one that believes the data sheets, one that buys more of what
it has measured and, with --up-front, one that measures all its cells before it asks.

A regret above 1 may be a fault of the planner, or the price of its promise: a fleet that passed in
the judge's draw may fail in the next. So the regret is also given against an informed planner, who
knows the world whole and promises the same: the cheapest fleet that keeps its SLOs in nine of ten
draws. It is looked for below what lmi-bench has paid.

Two things are stricter than they were. A fleet is judged on 1,000 requests: with 300 a fleet beyond
its capacity passed, because its queue had no time to grow, and the cheapest of many fleets was the
luckiest. And a device has one set of figures in all machines that have it: machines of like devices
had drawn different ones under one name, which no planner could have told apart.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.support.work_items import add_options, mapped
from lmi_bench.analysis.fit.fit import fit_cells
from lmi_bench.analysis.fit.from_run import profile_of_fit
from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.fleet.measured_load import MeasuredLoad, settled
from lmi_bench.analysis.fleet.operating_point import Latencies, alone_of, worst_ratio
from lmi_bench.analysis.fleet.recommender import best_fleets, prepare, recommend, screen
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import CopyPlan, Layout, Workload, plan_copy
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.profiles import EngineProfile, StepParameters
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import Accelerator
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun
from lmi_bench.core.slo import Slo
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.step_shape import StepShape, StepTime

JUDGED_REQUESTS = 1000
MEASURED_REQUESTS = 3000
MOST_CELLS = 8
FIRST_USERS = (1, 24)
MOST_MACHINES = 400
DRAWS, BROKEN_DRAWS = 10, 1  # an informed planner's fleet: most draws in which its SLOs break
UP_FRONT = "all cells up front"
PLANNERS = ("lmi-bench", UP_FRONT, "cheapest that fits", "data sheet", "nearest cell")


class HiddenEngine:
    """The world's step time: the same physics with other constants, and what no model has."""

    def __init__(self, model: StepTime, effects: dict[str, float], seed: int) -> None:
        self._model = model
        self._effects = effects
        self._chance = random.Random(seed)

    def step_time_s(self, shape: StepShape) -> float:
        effects = self._effects
        if effects and shape.prefill_tokens:
            kept = 1 - effects["prefix_hits"]
            shape = replace(
                shape,
                prefill_tokens=max(1, round(shape.prefill_tokens * kept)),
                prefill_context_pairs=max(1, round(shape.prefill_context_pairs * kept)),
            )
        step_s = self._model.step_time_s(shape)
        if effects:
            step_s += effects["host_per_square_s"] * shape.decode_sequences**2
            if self._chance.random() < effects["stall_share"]:
                step_s += effects["stall_s"]
        return step_s


@dataclass(frozen=True)
class World:
    number: int
    machines: tuple[Instance, ...]
    workload: Workload
    truth: EngineProfile
    effects: dict[str, float]
    rate_per_s: float
    slos: tuple[Slo, ...]

    def plan(self, layout: Layout) -> CopyPlan:
        return plan_copy(layout, self.workload, self.truth, open_loop=True)

    def config(self, plan: CopyPlan) -> SchedulerConfig:
        if not self.effects:
            return plan.config
        limit = max(4, int(plan.config.max_rolling_batch_size * self.effects["batch_share"]))
        return replace(plan.config, max_rolling_batch_size=limit)

    def run(self, plan: CopyPlan, spec: LevelSpec, *, hidden: int, seed: int = 0) -> LevelRun:
        """A level of one copy. hidden: seed of the stalls; seed: of the arrivals."""
        return simulate_level(
            spec,
            self.workload.requests(seed),
            self.config(plan),
            HiddenEngine(plan.steady.model, self.effects, seed=hidden),
            seed=seed,
            overhead_s=plan.steady.overhead_s,
        )


def draw_world(number: int) -> World:
    """The same number draws the same world."""
    chance = random.Random(number)

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    machines = []
    devices: dict[str, Accelerator] = {}
    for name in ("ml.g5.2xlarge", "ml.g6e.2xlarge", "ml.g5.12xlarge", "ml.p4d.24xlarge"):
        model = find_instance(name)
        device = model.accelerator
        assert device.bandwidth_bytes_per_s
        assert device.float16_flop_per_s
        assert model.price_usd_per_hour
        if device.name not in devices:  # the same device is the same in every machine
            devices[device.name] = replace(
                device,
                name=f"{device.name}-{number}",
                bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * between(0.6, 1.7),
                float16_flop_per_s=device.float16_flop_per_s * between(0.6, 1.7),
                memory_bytes=int(device.memory_bytes * between(0.9, 1.5)),
            )
        machines.append(
            replace(
                model, accelerator=devices[device.name], price_usd_per_hour=model.price_usd_per_hour * between(0.5, 2.0)
            )
        )
    prior = EAGER_GPU_PRIOR
    values = {
        name: getattr(prior.parameters, name) * math.exp(chance.gauss(0.0, prior.log_sd[name])) for name in prior.log_sd
    }
    for name in values:
        if name.endswith("_share"):
            values[name] = min(values[name], 0.95)
    truth = replace(prior, name="hidden", parameters=StepParameters(**values))
    effects = {}
    if number % 2:
        effects = {
            "stall_share": between(0.0005, 0.005),
            "stall_s": between(0.02, 0.2),
            "batch_share": chance.choice((0.03, 0.06, 1.0)),
            "host_per_square_s": between(1e-7, 3e-6),
            "prefix_hits": chance.choice((0.0, 0.3, 0.6)),
        }
    workload = Workload(find_model("llama-2-7b"), "float16", chance.choice((128, 256, 512)), chance.choice((32, 64)))
    world = World(number, tuple(machines), workload, truth, effects, 1.0, ())
    reference = world.plan(Layout(machines[0], 1)).steady
    step_s = reference.decode_step_s(1)
    ttft_s = alone_of(reference).latency_s("ttft", "mean", 1.0) + step_s
    slos = (Slo("itl", "p90", 1e3 * step_s * between(1.4, 5.0)), Slo("ttft", "p90", 1e3 * ttft_s * between(3, 20)))
    rate = reference.saturated_rate_per_s * between(0.3, 8.0)
    return replace(world, rate_per_s=rate, slos=slos)


class Judge:
    """Runs fleets in the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[tuple[str, int, int, int], bool] = {}

    def layouts(self) -> list[Layout]:
        found = []
        for machine in self._world.machines:
            for degree in (1, 2, 4, 8):
                if degree <= machine.num_accelerators:
                    layout = Layout(machine, degree)
                    try:
                        self._world.plan(layout)
                    except InputError:
                        continue
                    found.append(layout)
        return found

    def keeps(self, layout: Layout, machines: int, draw: int = 0) -> bool:
        key = (layout.instance.instance_type, layout.tensor_parallel, machines, draw)
        if key not in self._seen:
            self._seen[key] = self._run(layout, machines, draw)
        return self._seen[key]

    def promises(self, layout: Layout, machines: int) -> bool:
        """Whether the fleet keeps its SLOs in nine of ten draws."""
        broken = 0
        for draw in range(DRAWS):
            broken += not self.keeps(layout, machines, draw)
            if broken > BROKEN_DRAWS:
                return False
        return True

    def informed_cost(self, paid: float) -> float:
        """What the cheapest fleet costs that keeps the promise, if that is less than was paid."""
        best = paid
        for layout in sorted(self.layouts(), key=lambda each: cost_of(each, 1)):
            top = math.ceil(best / cost_of(layout, 1) - 1e-9) - 1
            if top < 1 or not self.promises(layout, top):
                continue
            low, high = 0, top
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self.promises(layout, middle) else (middle, high)
            best = min(best, cost_of(layout, high))
        return best

    def _run(self, layout: Layout, machines: int, draw: int) -> bool:
        world = self._world
        plan = world.plan(layout)
        rate = world.rate_per_s / (machines * layout.copies)
        if rate > 1.3 * plan.steady.saturated_rate_per_s:
            return False
        ramp = min(200, math.ceil(plan.steady.batch_at(rate)))
        spec = LevelSpec(0, Load(rate_per_s=rate), num_requests=JUDGED_REQUESTS + ramp)
        seed = world.number + 10_007 * draw
        level = world.run(plan, spec, hidden=seed, seed=1_000_003 + seed)
        settled = Latencies.of(level.records[ramp:], open_loop=True)
        return worst_ratio(settled.statistic_s, world.slos) <= 1

    def least_cost(self, known: Sequence[tuple[Layout, int]]) -> float | None:
        """The cheapest fleet that keeps the SLOs, given some that might."""
        best = min((cost_of(layout, n) for layout, n in known if self.keeps(layout, n)), default=math.inf)
        for layout in sorted(self.layouts(), key=lambda each: cost_of(each, 1)):
            price = cost_of(layout, 1)
            top = MOST_MACHINES if best == math.inf else math.ceil(best / price - 1e-9) - 1
            if top < 1 or not self.keeps(layout, top):
                continue
            low, high = 0, top
            while high - low > 1:
                middle = (low + high) // 2
                if self.keeps(layout, middle):
                    high = middle
                else:
                    low = middle
            best = min(best, cost_of(layout, high))
        return None if best == math.inf else best


def cost_of(layout: Layout, machines: int) -> float:
    assert layout.instance.price_usd_per_hour
    return layout.instance.price_usd_per_hour * machines


def measure(world: World, layout: Layout, concurrency: int) -> MeasuredLevel:
    """One cell as a sweep of the world's closed loop gives it."""
    plan = world.plan(layout)
    requests = max(3 * concurrency, 20)
    spec = LevelSpec(0, Load(concurrency=concurrency), num_requests=requests)
    level = world.run(plan, spec, hidden=world.number + concurrency)
    seen = Latencies.of(level.records, open_loop=False)
    wall_s = max(record.token_times_s[-1] for record in level.records)
    workload = world.workload
    return MeasuredLevel(
        Setup(workload.shape, layout.instance, layout.tensor_parallel, workload.dtype),
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        load=Load(concurrency),
        num_requests=requests,
        throughput_tokens_per_s=requests * workload.output_tokens / wall_s,
        latency_p90_s_per_token=seen.statistic_s("latency_per_token", "p90"),
        ttft_mean_s=seen.statistic_s("ttft", "mean"),
        tpot_mean_s=seen.statistic_s("tpot", "mean"),
    )


def eight_cells(world: World, layouts: Sequence[Layout]) -> list[MeasuredLevel]:
    """Four loads on a single device, four on the widest layout."""
    single = next(layout for layout in layouts if layout.tensor_parallel == 1)
    widest = max(layouts, key=lambda layout: layout.tensor_parallel)
    return [
        *(measure(world, single, users) for users in (1, 8, 24, 64)),
        *(measure(world, widest, users) for users in (1, 8, 32, 96)),
    ]


Choice = tuple[Layout, int] | None


def question(world: World, profile: EngineProfile, measured: Sequence[MeasuredLoad] = ()) -> RecommendRequest:
    return RecommendRequest(
        world.workload,
        profile,
        load=Load(rate_per_s=world.rate_per_s),
        slos=world.slos,
        instances=world.machines,
        degrees=(1, 2, 4, 8),
        measured=tuple(measured),
    )


def choice_of(world: World, answer: Recommendation) -> Choice:
    best = answer.recommended
    if best is None:
        return None
    machine = next(m for m in world.machines if m.instance_type == best.instance)
    return Layout(machine, best.tensor_parallel), best.instances


def ask(world: World, profile: EngineProfile) -> Choice:
    return choice_of(world, recommend(question(world, profile)))


def measure_load(world: World, layout: Layout, rate_per_s: float, index: int) -> MeasuredLoad:
    """One copy under random arrivals, with draws of its own."""
    plan = world.plan(layout)
    seed = 2_000_003 + 10 * world.number + index
    spec = LevelSpec(0, Load(rate_per_s=rate_per_s), num_requests=MEASURED_REQUESTS)
    level = world.run(plan, spec, hidden=seed, seed=seed)
    return MeasuredLoad(layout.copy_key, rate_per_s, settled(level.records))


def calibrated(world: World, cells: Sequence[MeasuredLevel]) -> EngineProfile:
    return profile_of_fit(
        fit_cells(EAGER_GPU_PRIOR, cells), fitted_on=f"world {world.number}", fitted_date="2026-11-21"
    )


def measure_and_ask(world: World, layouts: Sequence[Layout]) -> Choice:
    """What the planner tells its user to do: calibrate, then measure the loads that decide."""
    first = first_layouts(world, layouts)
    cells = [measure(world, layout, users) for layout in first for users in FIRST_USERS]
    fitted = calibrated(world, cells)
    measured: list[MeasuredLoad] = []
    prepared = prepare(question(world, fitted))
    while True:
        answer = recommend(question(world, fitted, measured), prepared=prepared)
        if len(cells) + len(measured) == MOST_CELLS or not answer.measure_next:
            return choice_of(world, answer)
        probe = answer.measure_next[0]
        measured.append(measure_load(world, probe.layout, probe.rate_per_s, len(measured)))


def first_layouts(world: World, layouts: Sequence[Layout]) -> list[Layout]:
    """Before anything is measured: the two best layouts on unlike engines by the prior."""
    request = question(world, EAGER_GPU_PRIOR)
    screened, _ = screen(request)
    chosen: dict[object, Layout] = {}
    for layout, _, _ in best_fleets(request, screened, []):
        chosen.setdefault(layout.engine_key, layout)
    return list(chosen.values())[:2] or list(layouts[:1])


def believe_data_sheets(world: World) -> EngineProfile:
    """Full bandwidth and compute, a host that takes no time, no doubt."""
    ideal = StepParameters(
        bandwidth_share=1.0,
        compute_share=1.0,
        host_per_layer_s=0.0,
        host_per_sequence_s=0.0,
        host_per_prompt_token_s=0.0,
        host_stretch_per_rank=0.0,
        nvlink_latency_s=0.0,
        nvlink_share=1.0,
        pcie_latency_s=0.0,
        pcie_share=1.0,
    )
    return replace(
        EAGER_GPU_PRIOR,
        name="data sheet",
        parameters=ideal,
        log_sd={},
        residual_log_sd=0.0,
        accelerators=tuple(machine.accelerator.name for machine in world.machines),
    )


def cheapest_that_fits(world: World, layouts: Sequence[Layout]) -> Choice:
    """The cheapest machine that holds the model, as many as its data sheet says carry the load."""
    layout = min(layouts, key=lambda each: (cost_of(each, 1), each.tensor_parallel))
    plan = plan_copy(layout, world.workload, believe_data_sheets(world), open_loop=True)
    per_machine = plan.steady.saturated_rate_per_s * layout.copies
    return layout, math.ceil(world.rate_per_s / per_machine)


def nearest_cell(world: World, layouts: Sequence[Layout], cells: Sequence[MeasuredLevel]) -> Choice:
    """More of what was measured: the cheapest cell whose own latencies are within the SLOs."""
    found: list[tuple[float, Layout, int]] = []
    limits = {slo.metric: slo.limit_ms / 1e3 for slo in world.slos}
    for cell in cells:
        assert cell.tpot_mean_s is not None
        assert cell.ttft_mean_s is not None
        assert cell.throughput_tokens_per_s
        if cell.tpot_mean_s > limits["itl"] or cell.ttft_mean_s > limits["ttft"]:
            continue
        layout = next(
            each
            for each in layouts
            if each.instance.instance_type == cell.setup.instance.instance_type
            and each.tensor_parallel == cell.setup.tensor_parallel
        )
        carries = layout.copies * cell.throughput_tokens_per_s / cell.output_tokens
        machines = math.ceil(world.rate_per_s / carries)
        found.append((cost_of(layout, machines), layout, machines))
    if not found:
        return None
    _, layout, machines = min(found, key=lambda item: item[0])
    return layout, machines


@dataclass(frozen=True)
class Outcome:
    """One planner in one world: `answer` is none, kept or broken.

    informed  the regret against who knows the world and promises the same
    """

    answer: str
    regret: float | None = None
    informed: float | None = None


Row = tuple[int, bool, dict[str, Outcome]]
"""A world, whether it has effects that the model lacks, and what each planner reached in it."""


def audit_world(number: int, up_front: bool) -> dict[str, Any] | None:
    """The planners in one world, a work item; None where no fleet at all keeps its SLOs."""
    world = draw_world(number)
    judge = Judge(world)
    layouts = judge.layouts()
    cells = eight_cells(world, layouts)
    choosers: dict[str, Callable[[], Choice]] = {
        "lmi-bench": lambda: measure_and_ask(world, layouts),
        UP_FRONT: lambda: ask(world, calibrated(world, cells)),
        "cheapest that fits": lambda: cheapest_that_fits(world, layouts),
        "data sheet": lambda: ask(world, believe_data_sheets(world)),
        "nearest cell": lambda: nearest_cell(world, layouts, cells),
    }
    choices = {name: choosers[name]() for name in PLANNERS if up_front or name != UP_FRONT}
    least = judge.least_cost([choice for choice in choices.values() if choice is not None])
    if least is None:
        return None
    outcomes = {}
    for name, choice in choices.items():
        if choice is None:
            outcomes[name] = Outcome("none")
        elif judge.keeps(*choice):
            paid = cost_of(*choice)
            informed = None
            if name == "lmi-bench":
                informed = 1.0 if paid <= least * 1.001 else paid / judge.informed_cost(paid)
            outcomes[name] = Outcome("kept", paid / least, informed)
        else:
            outcomes[name] = Outcome("broken")
    found = {name: asdict(each) for name, each in outcomes.items()}
    return {"number": number, "has_effects": bool(world.effects), "outcomes": found}


def row_of(found: dict[str, Any]) -> Row:
    outcomes = {name: Outcome(**each) for name, each in found["outcomes"].items()}
    return found["number"], found["has_effects"], outcomes


def summary(rows: Sequence[Row]) -> list[str]:
    """The table in Markdown."""
    lines = [
        "| worlds | planner | answers | SLO broken | 90 % interval | regret median | p90 | worst | "
        "p90 against the informed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = {
        "all": rows,
        "as modelled": [row for row in rows if not row[1]],
        "with effects that the model lacks": [row for row in rows if row[1]],
    }
    for label, group in groups.items():
        for name in PLANNERS:
            outcomes = [row[2][name] for row in group if name in row[2]]
            given = [each for each in outcomes if each.answer != "none"]
            broken = sum(each.answer == "broken" for each in given)
            regrets = [each.regret for each in given if each.regret is not None]
            if not given:
                continue
            low, high = wilson(broken, len(given))
            figures = ["", "", "", ""]
            if regrets:
                middle, late = np.quantile(regrets, [0.5, 0.9])
                figures[:3] = [f"{middle:.3f}", f"{late:.3f}", f"{max(regrets):.2f}"]
            informed = [each.informed for each in given if each.informed is not None]
            if informed:
                figures[3] = f"{np.quantile(informed, 0.9):.3f}"
            lines.append(
                f"| {label}, {len(group)} | {name} | {len(given)} | {broken / len(given):.1%} | "
                f"{low:.0%} to {high:.0%} | {' | '.join(figures)} |"
            )
    return lines


def wilson(hits: int, total: int, z: float = 1.645) -> tuple[float, float]:
    """The 90 % interval of a share."""
    share, square = hits / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
    return max(0.0, middle - half), middle + half


def _shown(outcome: Outcome) -> str:
    regrets = (outcome.regret, outcome.informed)
    return " ".join([outcome.answer, *(f"{each:.3f}" for each in regrets if each is not None)])


def _print_world(_item: object, found: dict[str, Any] | None) -> None:
    if found is not None:
        number, has_effects, outcomes = row_of(found)
        shown = {name: _shown(each) for name, each in outcomes.items()}
        print(number, "effects" if has_effects else "plain", shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--up-front", action="store_true", help=f"also: {UP_FRONT}; slower")
    parser.add_argument("--out", type=Path)
    add_options(parser)
    given = parser.parse_args()
    start_s = time.perf_counter()
    numbers = range(given.first, given.first + given.worlds)
    items = [(number, given.up_front) for number in numbers]
    found = mapped(audit_world, items, given, _print_world)
    rows = [row_of(each) for each in found if each is not None]
    hopeless = len(found) - len(rows)
    lines = [
        "# Self-consistency of decisions",
        "",
        f"Printed by `python benchmarks/decision_audit.py --worlds {given.worlds}`: worlds "
        f"{numbers[0]} to {numbers[-1]}, {hopeless} of them left out because no fleet of up to "
        f"{MOST_MACHINES} machines keeps their SLOs. Virtual time, {JUDGED_REQUESTS} judged "
        "requests a fleet. The planner promises each fleet with 90 % confidence, so SLOs should "
        "break in at most 10 %. Regret: cost over that of the cheapest fleet that keeps the SLOs "
        "in the judge's draw; against the informed: over that of the cheapest which does so in "
        f"{DRAWS - BROKEN_DRAWS} of {DRAWS} draws, known beforehand.",
        "",
        *summary(rows),
        "",
        f"{time.perf_counter() - start_s:,.0f} s on "
        + (f"{given.workers} core(s)." if given.ray is None else "a Ray cluster."),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
