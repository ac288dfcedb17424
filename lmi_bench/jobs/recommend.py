"""A recommendation: its basis (a profile or runs) and the ranked fleets; models of a file, too."""

import json
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, cast

from pydantic import Field

from lmi_bench.analysis.fit import from_run
from lmi_bench.analysis.fleet.answer import Candidate, Recommendation, Variation
from lmi_bench.analysis.fleet.measured_load import MeasuredLoad, loads_from_run
from lmi_bench.analysis.fleet.money import parse_availability
from lmi_bench.analysis.fleet.pools import PoolsFleet, best_pools, cheaper_pools, check_pools
from lmi_bench.analysis.fleet.portfolio import Portfolio, member_of, share_machines
from lmi_bench.analysis.fleet.ranking import frontier
from lmi_bench.analysis.fleet.recommender import Prepared, prepare
from lmi_bench.analysis.fleet.recommender import recommend as rank
from lmi_bench.analysis.fleet.request import LONE_REQUEST, Objective, RecommendRequest, Routing
from lmi_bench.analysis.fleet.vary import AnswerChange, parse_range, sensitivity, vary_rate
from lmi_bench.analysis.level.layouts import Rejection, Workload
from lmi_bench.analysis.model.builtin_profiles import BUNDLED_CPU_PRIOR
from lmi_bench.analysis.model.checkpoint_dtype import narrow_dtype
from lmi_bench.analysis.model.engine_setting import SPLITTING_ENGINES, settings_of
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, probe_machine
from lmi_bench.analysis.model.profiles import EngineProfile, profile_to_json
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import Run, load_run
from lmi_bench.core.scenario import DEFAULT_MODEL, load_scenario, read_yaml
from lmi_bench.core.scenario_sections import Section
from lmi_bench.core.slo import parse_slo
from lmi_bench.deploy.images import machine_problem
from lmi_bench.jobs import planned
from lmi_bench.jobs.files import checked
from lmi_bench.jobs.settings.recommend import RecommendSettings
from lmi_bench.targets.profiles import SHIPPED, VLLM_PROFILES, default_note, find_profile, with_host
from lmi_bench.targets.prompts import repeats_text

_SAME_MACHINES: Final = 3


@dataclass(frozen=True, slots=True)
class Advice:
    """What is recommended, for which request, on what basis.

    frontier     candidates that none beats in both cost and latency
    sensitivity  what would change the answer, if wanted
    variation    the cheapest layout of each load, if wanted
    other        if no profile was named: another shipped one, and the cheapest fleet of the same
                 machines by it (None: none carries the load)
    pools        the cheapest fleet with separate pools, or why there is none, if wanted; else,
                 in words, pools that may be much cheaper
    """

    answer: Recommendation
    request: RecommendRequest
    basis: "Basis"
    frontier: tuple[Candidate, ...]
    sensitivity: tuple[AnswerChange, ...] = ()
    variation: Variation | None = None
    other: tuple[str, Candidate | None] | None = None
    pools: PoolsFleet | str | None = None

    def to_json(self) -> dict[str, Any]:
        """As `recommend --json` writes it."""
        content: dict[str, Any] = {
            "model": self.basis.workload.shape.name,
            "model_as_named": self.basis.model,
            **self.answer.to_json(),
        }
        content["profile_document"] = json.loads(profile_to_json(self.basis.profile))
        names = ("instance", "instances", "tensor_parallel")
        content["frontier"] = [
            {name: getattr(each, name) for name in names} | {"setting": each.setting.describe() or None}
            for each in self.frontier
        ]
        if self.sensitivity:
            content["sensitivity"] = [each._asdict() for each in self.sensitivity]
        if self.other is not None:
            name, best = self.other
            content["other_profile"] = {"name": name, "recommended": best and best.to_json()}
        if self.pools is not None:
            pools = self.pools
            found = {"reason": pools} if isinstance(pools, str) else pools.to_json()
            content["disaggregated"] = found
        if self.variation is not None:
            content["vary"] = self.variation.to_json()
        return content


def recommend(settings: RecommendSettings, listener: Listener = SILENT) -> Advice:
    """Rank the fleets. Raises InputError for an unusable question."""
    basis = basis_of(settings, listener)
    request, without_image = with_images(settings, _request(settings, basis))
    span = None if settings.vary is None else parse_range(settings.vary)
    if settings.disaggregate:
        check_pools(request)  # before what takes long

    def tell(text: str, share: float) -> None:
        listener.progress(text, round(100 * share), 100)

    prepared = prepare(request, tell)
    answer = rank(request, progress=tell, prepared=prepared)
    if settings.axes.hosts is None:
        request, answer = _over_hosts(request, answer, listener)
    best = tuple(frontier(request, answer.candidates))
    changes: tuple[AnswerChange, ...] = ()
    if settings.explain:
        listener.progress("what would change the answer", 100, 100)
        changes = tuple(sensitivity(request, answer))
    tell("prefill and decode in separate pools", 1.0)
    pools = _pools(settings, request, prepared, answer)
    variation = None
    if span is not None:
        listener.progress("the cheapest layout of every load", 100, 100)
        variation = vary_rate(request, *span)
    rejected = (*answer.rejected, *without_image)
    answer = replace(answer, accuracy=basis.accuracy, rejected=rejected).with_caveats(lengths_assumed=basis.assumed)
    other = None
    if settings.profile is None and basis.accuracy is None and answer.recommended is not None:
        other = _by_other_profile(request, answer)
    return Advice(answer, request, basis, best, changes, variation, other, pools)


def _pools(
    settings: RecommendSettings, request: RecommendRequest, prepared: Prepared, answer: Recommendation
) -> PoolsFleet | str | None:
    """The pools that are asked for, simulated; else much cheaper ones than the answer's fleet."""
    if settings.disaggregate:
        return best_pools(request, prepared[0])
    best, workload = answer.recommended, request.workload
    is_planned = request.rate_per_s is not None and workload.traffic is None and not workload.cached_tokens
    is_wanted = request.slos and request.objective in ("cost", "cost-per-hour")
    if not (is_planned and is_wanted and request.profile.name.lower() in SPLITTING_ENGINES):
        return None
    return cheaper_pools(request, prepared[0], math.inf if best is None else best.price_usd_per_hour or 0.0)


def _over_hosts(
    request: RecommendRequest, answer: Recommendation, listener: Listener
) -> tuple[RecommendRequest, Recommendation]:
    """Where no machine holds a copy: the question for copies that span some, and its answer."""
    for wider in () if answer.recommended or answer.nearest else request.over_hosts():
        found, hosts = rank(wider), wider.settings[0].hosts
        if found.recommended or found.nearest:
            text = f"no machine alone holds a copy: each spans {hosts} (--hosts {hosts})"
            listener.note(text)
            rejected = (*answer.rejected, *found.rejected)
            return wider, replace(found, rejected=rejected, warnings=(text, *found.warnings))
    return request, answer


def _by_other_profile(request: RecommendRequest, answer: Recommendation) -> tuple[str, Candidate | None] | None:
    """The same question to the other vLLM profile, for the best machines of the answer."""
    name = next(one for one in VLLM_PROFILES if SHIPPED[one].provenance != request.profile.provenance)
    named = (each.instance.rpartition(" x ")[2] for each in answer.candidates)  # of several hosts
    ranked = list(dict.fromkeys(named))[:_SAME_MACHINES]
    machines = tuple(one for one in request.instances or () if one.instance_type in ranked)
    host = ("host_cache_bytes", "host_bytes_per_s")
    profile = replace(SHIPPED[name], **{each: getattr(request.profile, each) for each in host})
    asked = replace(request, profile=profile, instances=machines, simulate_long=False, simulated_copies=_SAME_MACHINES)
    try:
        return name, rank(asked, intervals=False).recommended
    except InputError:  # it does not load the model
        return None


def with_images(settings: RecommendSettings, request: RecommendRequest) -> tuple[RecommendRequest, list[Rejection]]:
    """The request without SageMaker machines that no image of the engine runs on, and these."""
    if settings.price_list.platform != "sagemaker":
        return request, []
    engine = request.profile.name.lower()
    problems = {
        each.instance_type: problem
        for each in request.instances or ()
        if each.instance_type.startswith("ml.") and (problem := machine_problem({engine}, each)) is not None
    }
    kept = tuple(one for one in request.instances or () if one.instance_type not in problems)
    if not kept:
        raise InputError("; ".join(f"{name}: {text}" for name, text in problems.items()))
    rejected = [Rejection(name, None, None, text) for name, text in problems.items()]
    return replace(request, instances=kept), rejected


def _request(settings: RecommendSettings, basis: "Basis") -> RecommendRequest:
    """The planner's request; a load that is not stated is the scenario's."""
    load, shape = _load(settings, basis), basis.workload.shape
    machines = planned.repriced(basis.instances, settings.price_list)
    if (gbps := settings.network_gbps) is not None:
        machines = tuple(replace(each, network_bits_per_s=gbps * 1e9 * each.num_accelerators) for each in machines)
    return RecommendRequest(
        workload=planned.with_prefix_hits(basis.workload, settings, load),
        profile=basis.profile,
        engine_version=settings.engine_version,
        load=load,
        slos=tuple(parse_slo(text) for text in settings.slo or basis.slos),
        objective=cast("Objective", settings.objective),
        instances=machines,
        degrees=settings.tensor_parallel or None,
        blended_ratio=settings.blended_ratio,
        discount=settings.discount,
        seed=settings.seed,
        purchase=planned.purchase_of(settings),
        availability=parse_availability(settings.availability),
        requirements=planned.requirements_of(settings),
        routing=cast("Routing", settings.router.replace("_", "-")),
        simulate_long=True,
        measured=basis.measured,
        calibrated=basis.accuracy is not None,
        settings=settings_of(
            planned.engine_axes(settings.axes, shape), dtype=basis.workload.dtype, profile=basis.profile, shape=shape
        ),
    )


def _load(settings: RecommendSettings, basis: "Basis") -> Load | None:
    """The stated load, else the scenario's; raises InputError for one that is not whole."""
    rate, users, think_time_s = settings.rate, settings.users, settings.think_time
    if rate is not None and users is not None:
        raise InputError("give either a rate (--rate) or users (--users), not both")
    if (users is None) != (think_time_s is None) and settings.turns is None:
        raise InputError(
            "--users and --think-time belong together: the seconds between an answer and "
            "the next question decide how many users are waiting at once (0 for none)"
        )
    if users is not None:
        return Load(users, think_time_s=think_time_s)
    rate = basis.rate_per_s if rate is None else rate
    if rate is None and settings.objective == "latency":
        return LONE_REQUEST  # a batch would only add to the latency that is asked for
    return None if rate is None else Load(rate_per_s=rate)


@dataclass(frozen=True, slots=True)
class Basis:
    """What a recommendation rests on.

    model             as the user or the run names it: a variant has the shape of its base
    instances         the machines to choose from; None: all
    accuracy          errors of the profile on the levels that it was fitted to
    measured          levels of random arrivals in the runs
    rate_per_s, slos  of the scenario; notes: what the plan leaves out of it
    assumed           whether the lengths of its requests are assumed
    """

    profile: EngineProfile
    instances: tuple[Instance, ...] | None
    workload: Workload
    model: str
    accuracy: tuple[from_run.LevelAccuracy, ...] | None = None
    measured: tuple[MeasuredLoad, ...] = ()
    rate_per_s: float | None = None
    slos: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: bool = False


def basis_of(settings: RecommendSettings, listener: Listener) -> Basis:
    """The basis of these settings. Raises InputError if they state too little."""
    runs = [load_run(path) for path in settings.runs]
    _check_flags_apply(settings, runs)
    if settings.workload is None and not settings.describes_prompts:
        return _measured(settings, runs, listener) if runs else _from_profile(settings)
    if settings.workload is None:
        scenario, source = planned.described_scenario(settings), "the workload"
    elif settings.describes_prompts or (settings.input_tokens or settings.output_tokens):
        raise InputError("--workload has lengths of its own: leave --input-tokens and others out")
    else:
        scenario, source = load_scenario(settings.workload), str(settings.workload)
    if runs:
        base = _measured(settings, runs, listener)
    else:
        model = settings.model or (scenario.model if scenario.model != DEFAULT_MODEL else None)
        if model is None:
            raise InputError(f"{settings.workload or 'nothing'} names no model: add --model")
        base = _from_profile(replace(settings, model=model, trace=None, input_tokens=1, output_tokens=1))
    return replace(
        base,
        profile=with_host(base.profile, scenario.engine, repeats_text(scenario)),
        workload=planned.workload_of(scenario, source, base.workload.shape, base.workload.dtype),
        measured=(),
        rate_per_s=planned.rate_of(scenario),
        slos=scenario.slo,
        notes=(*base.notes, *(() if scenario.workload.trace is None else (planned.OF_A_TRACE,))),
        assumed="lengths" in scenario.unrecorded,
    )


def _check_flags_apply(settings: RecommendSettings, runs: list[Run]) -> None:
    """Raises InputError for an option that has nothing to apply to."""
    if settings.measured_on and not runs:
        raise InputError("--measured-on names the machine of runs: give the run folders, too")
    local = LOCAL_NAME in settings.instances or any(run.manifest.target.is_bundled for run in runs)
    if settings.machine_price is not None and not local:
        raise InputError(
            f"--machine-price-per-hour is the price of this machine (--instance {LOCAL_NAME}); "
            "for other machines use a --prices file"
        )


def _from_profile(settings: RecommendSettings) -> Basis:
    """A shipped or calibrated profile, with notes on the defaults that were applied."""
    model, prompt, output = settings.model, settings.input_tokens, settings.output_tokens
    if model is None or prompt is None or output is None:
        named = {"--model": model, "--input-tokens": prompt, "--output-tokens": output}
        missing = [flag for flag, value in named.items() if value is None]
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{', '.join(missing)} {verb} missing: give a run folder, or --model, --input-tokens and --output-tokens"
        )
    dtype = planned.first_dtype(settings.axes)
    notes = (default_note(settings.profile), *planned.model_notes(model, dtype))
    return Basis(
        find_profile(settings.profile, settings.kv_tokens),
        _machines(settings, None),
        planned.planned_workload(model, dtype, prompt, output),
        model,
        notes=tuple(text for text in notes if text is not None),
    )


def _measured(settings: RecommendSettings, runs: list[Run], listener: Listener) -> Basis:
    """The profile fitted to the runs' closed loops, and the loads of their open loops."""
    first = runs[0]
    for run in runs:
        if not run.levels:
            raise InputError(
                f"{run.path} has no finished level to calibrate on: sweep again, or continue it with --resume"
            )
    measured_model = _measured_model(settings, runs)
    measured_shape = find_model(measured_model)
    model = settings.model or measured_model
    shape = find_model(model)
    ours = any(run.manifest.target.is_bundled for run in runs)
    base = None if settings.profile is None else find_profile(settings.profile)
    if ours:
        base = base or BUNDLED_CPU_PRIOR
    local = _this_machine(settings, base) if base is not None and ours else None
    placed = [_placed(settings, run, at, len(runs), local=local) for at, run in enumerate(runs)]
    closed = [each for each in placed if not all(line.load.is_open for line in each.run.levels)]
    profile, accuracy = base or from_run.prior_for_run(first, ()), None
    if closed:
        listener.note(from_run.calibrated_levels([each.run for each in closed]))
        # a server's own name for its model does not imply a format
        dtype = narrow_dtype(model) if measured_model == settings.model else None
        profile, accuracy = from_run.calibrate_on_runs(base, closed, measured_shape, dtype=dtype)
    if settings.kv_tokens is not None:
        profile = replace(profile, cache_tokens=settings.kv_tokens)
    lengths = from_run.run_lengths(first)
    of_model = None if settings.model is None else narrow_dtype(settings.model)
    workload = Workload(
        shape,
        planned.first_dtype(settings.axes) or of_model or from_run.run_dtype(first),
        lengths[0] if settings.input_tokens is None else settings.input_tokens,
        lengths[1] if settings.output_tokens is None else settings.output_tokens,
    )
    loads = [] if shape.name != measured_shape.name else _loads(placed, workload, listener)
    machines = _machines(settings, local)
    assumed = any("lengths" in run.manifest.scenario.unrecorded for run in runs)
    return Basis(profile, machines, workload, model, accuracy, tuple(loads), assumed=assumed)


def _this_machine(settings: RecommendSettings, profile: EngineProfile) -> Instance:
    """This machine, by the figures in the profile, or measured now if it has none."""
    machine = profile.machine or probe_machine()
    return machine.instance(price_usd_per_hour=settings.machine_price)


def _measured_model(settings: RecommendSettings, runs: list[Run]) -> str:
    """The model of the runs; `--model` names it if the server's name for it is unknown.

    Raises InputError for runs of several models, or of an unknown one.
    """
    known = {}
    for run in runs:
        name = from_run.run_model(run)
        try:
            known[name] = find_model(name).name
        except InputError as exc:
            if settings.model is None:
                raise InputError(f"{run.path}: {exc} That is the server's name for it: add --model NAME.") from exc
            known[settings.model] = find_model(settings.model).name
    if len(set(known.values())) > 1:
        raise InputError(
            f"the runs have several models ({', '.join(known)}) but a profile is fitted to one: "
            "give the runs of one model"
        )
    return next(iter(known))


def _loads(placed: list[from_run.PlacedRun], workload: Workload, listener: Listener) -> list[MeasuredLoad]:
    """Measured loads of the workload's weight format; other formats have other timing."""
    found = [
        load
        for each in placed
        if from_run.run_dtype(each.run) == workload.dtype
        for load in loads_from_run(each, workload)
    ]
    if found:
        listener.note(f"{len(found)} measured load(s) of random arrivals are compared with the SLOs")
    return found


def _placed(
    settings: RecommendSettings, run: Run, index: int, count: int, *, local: Instance | None
) -> from_run.PlacedRun:
    """The run with its machine: that of `--measured-on`, or as the run states."""
    given = settings.measured_on
    if len(given) not in (0, 1, count):
        raise InputError(
            f"--measured-on is given {len(given)} times for {count} runs: give it once for all, or "
            "once for each in order"
        )
    if run.manifest.target.is_bundled and local is not None:
        return from_run.PlacedRun(run, local)
    name = given[index if len(given) > 1 else 0] if given else run.manifest.target.instance
    if name is None:
        raise InputError(
            f"{run.path} does not state which machine its endpoint runs on: add "
            "--measured-on INSTANCE, such as --measured-on ml.g5.2xlarge"
        )
    machine, _, degree = str(name).partition(":")
    if degree and not (degree.isdecimal() and int(degree) >= 1):
        raise InputError(f"--measured-on {name}: write INSTANCE or INSTANCE:TP, such as {machine}:4")
    return from_run.PlacedRun(run, find_instance(machine), int(degree) if degree else None)


def _machines(settings: RecommendSettings, local: Instance | None) -> tuple[Instance, ...] | None:
    """The machines named by the user, else this one if it was measured as `local`."""
    if not settings.instances:
        return None if local is None else (local,)
    return tuple(
        planned.named_machine(name, settings.price_list)
        if name != LOCAL_NAME
        else local or _this_machine(settings, find_profile(settings.profile))
        for name in settings.instances
    )


class _Model(Section):
    model: str
    rate_per_s: Annotated[float, Field(gt=0)]
    input_tokens: Annotated[int, Field(ge=1)]
    output_tokens: Annotated[int, Field(ge=1)]
    name: str | None = None
    dtype: str | None = None
    slo: tuple[str, ...] = ()


class _File(Section):
    models: Annotated[tuple[_Model, ...], Field(min_length=1)]


def plan_portfolio(settings: RecommendSettings, listener: Listener = SILENT) -> Portfolio:
    """Plan the models of a file. Raises InputError for what cannot be planned."""
    assert settings.portfolio is not None
    expected = "models: [{model, rate_per_s, input_tokens, output_tokens, slo, dtype, name}]"
    source = str(settings.portfolio)
    file = checked(_File, read_yaml(settings.portfolio), source=source, expected=expected)
    prices, names = settings.price_list, settings.instances
    considered = tuple(planned.named_machine(name, prices) for name in names) or None
    requirements = planned.requirements_of(settings)
    machines, _ = requirements.split_by_region(planned.repriced(considered, prices))
    members = []
    for index, each in enumerate(file.models):
        name = each.name or each.model
        listener.progress(name, index, len(file.models))
        for text in planned.model_notes(each.model, each.dtype):
            listener.note(text)
        request = RecommendRequest(
            planned.planned_workload(each.model, each.dtype, each.input_tokens, each.output_tokens),
            find_profile(settings.profile),
            load=Load(rate_per_s=each.rate_per_s),
            slos=tuple(parse_slo(text) for text in each.slo),
            instances=tuple(machines),
            degrees=settings.tensor_parallel or None,
        )
        request, without_image = with_images(settings, request)
        for one in without_image if names and index == 0 else ():
            listener.note(f"{one.instance_type} is left out: {one.reason}")
        members.append(member_of(name, request))
    return share_machines(
        members,
        machines,
        purchase=planned.purchase_of(settings),
        availability=parse_availability(settings.availability),
    )
