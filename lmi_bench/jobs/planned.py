"""Planning settings as the planner takes them: prices, limits, engine settings, workloads.

Every function raises InputError that names the option which cannot be used.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from lmi_bench.analysis.fleet.money import Purchase, PurchaseKind, Requirements
from lmi_bench.analysis.level.layouts import RequestKind, Workload
from lmi_bench.analysis.level.prefix_hits import PrefixTraffic
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, planned_dtype
from lmi_bench.analysis.model.memory import weight_format
from lmi_bench.analysis.model.setup import ACCEPTANCE, OWN_LAYER, Setup, Speculation
from lmi_bench.analysis.model.speculation import acceptance_of_counts
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model, model_note
from lmi_bench.catalog.prices import Platform, load_price_list, reprice
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_lengths
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run
from lmi_bench.core.scenario import Scenario, parse_scenario
from lmi_bench.core.traces import read_trace
from lmi_bench.jobs.settings import recommend
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.jobs.settings.plan import PredictSettings
from lmi_bench.jobs.settings.planning import DraftSettings, PriceSettings
from lmi_bench.models.shape import ModelShape
from lmi_bench.targets.drafting import NGRAM_DRAFT
from lmi_bench.targets.prompts import PlannedPrompts, repeats_text

_DRAFT_TOKENS, _OWN_DRAFT_TOKENS = 4, 3
_MOST_KINDS = 500
OF_A_TRACE = "a copy's capacity is that of a trace's lengths and mean rate, not its arrival times"
_SEED = 20_261_121  # of lengths that are drawn from distributions


def planned_setup(model: str, instance: str, tensor_parallel: int, dtype: str | None = None) -> Setup:
    """One copy of a model on a machine; None for dtype: the checkpoint's, at most 16 bits."""
    return Setup(find_model(model), find_instance(instance), tensor_parallel, planned_dtype(model, dtype))


def model_notes(model: str, dtype: str | None) -> tuple[str, ...]:
    """Notes for the user on how the model was read, and on a format that was not stated."""
    return tuple(filter(None, (model_note(model), dtype_note(model, dtype))))


def planned_workload(model: str, dtype: str | None, input_tokens: int, output_tokens: int) -> Workload:
    """Equal requests of a model; None for dtype: the checkpoint's, at most 16 bits."""
    return Workload(find_model(model), planned_dtype(model, dtype), input_tokens, output_tokens)


def repriced(instances: Iterable[Instance] | None, settings: PriceSettings) -> tuple[Instance, ...]:
    """The machines with their prices; None: all of the platform. Raises InputError if none is left.

    Prices of the user's list override the platform's.
    """
    price_list = None if settings.prices is None else load_price_list(settings.prices)
    platform = cast("Platform", settings.platform)
    asked = None if instances is None else tuple(instances)
    found = reprice(asked, platform=platform, price_list=price_list)
    if not found:
        names = ", ".join(each.instance_type for each in asked or ())
        raise InputError(f"--platform {platform} does not offer {names}: use another --platform")
    return found


def named_machine(name: str, settings: PriceSettings) -> Instance:
    """A machine of the user's price list or the catalog; raises InputError for an unknown name."""
    own = {} if settings.prices is None else load_price_list(settings.prices)
    return own.get(name) or find_instance(name)


def planned_speculation(settings: DraftSettings, shape: ModelShape) -> Speculation | None:
    """The draft and the probability that the model accepts its tokens; None without a draft."""
    draft, draft_tokens = settings.draft, settings.draft_tokens
    acceptance = settings.draft_acceptance
    if draft is None:
        if draft_tokens is not None or acceptance is not None:
            raise InputError(
                "--draft-tokens and --draft-acceptance need speculative decoding: add --draft ngram or --draft MODEL"
            )
        return None
    own = draft == OWN_LAYER
    usual = _OWN_DRAFT_TOKENS if own else _DRAFT_TOKENS
    if acceptance is None and not own:
        raise InputError(
            f"--draft {draft}: add --draft-acceptance, the probability (0 to 1) that a drafted "
            "token is accepted, or a run of the bundled engine that measured it"
        )
    smaller = None if own or draft == NGRAM_DRAFT else find_model(draft)
    chance = ACCEPTANCE
    if acceptance is not None and Path(acceptance).is_dir():
        chance, usual = _measured(Path(acceptance))
    elif acceptance is not None:
        try:
            chance = float(acceptance)
        except ValueError:
            raise InputError(
                f"--draft-acceptance {acceptance}: neither a number from 0 to 1 nor a run folder"
            ) from None
    if own:
        return Speculation.by_own_layer(shape, draft_tokens or usual, chance)
    return Speculation(draft_tokens or usual, chance, smaller)


def _measured(folder: Path) -> tuple[float, int]:
    """The measured acceptance of a run, and its drafted tokens a step."""
    run = load_run(folder)
    engine = run.manifest.scenario.engine
    if engine.draft is None:
        raise InputError(f"--draft-acceptance {folder}: a run without speculation; sweep with --draft")
    drafted = accepted = 0
    for line in run.levels:
        done: Any = line.engine or {}
        drafted += int(done.get("drafted_tokens") or 0)
        accepted += int(done.get("accepted_tokens") or 0)
    count = engine.draft_tokens
    return acceptance_of_counts(drafted, accepted, count), count


def purchase_of(settings: recommend.RecommendSettings) -> Purchase:
    """How the fleet is bought."""
    if settings.purchase in ("spot", "reserved") and settings.price_list.platform == "sagemaker":
        raise InputError(
            f"--purchase {settings.purchase}: SageMaker's machines are sold on demand and by "
            "savings plan only; add --platform ec2, or use savings-plan"
        )
    kind = cast("PurchaseKind", settings.purchase)
    purchase = Purchase(kind, settings.commit_discount, settings.committed)
    has_rate = purchase.discount is not None or settings.price_list.prices is not None
    if purchase.kind != "on-demand" and not has_rate:
        raise InputError(
            f"--purchase {purchase.kind}: no rate is known; give --commit-discount D (0 to 1), or "
            "a --prices file with rates"
        )
    return purchase


def requirements_of(settings: recommend.RecommendSettings) -> Requirements:
    """The limits on the fleet."""
    return Requirements(
        settings.min_throughput,
        settings.max_usd_per_hour,
        settings.max_usd_per_month,
        settings.max_usd_per_1m,
        settings.region,
    )


def first_dtype(settings: recommend.AxisSettings) -> str | None:
    """The weight format that the others are compared with; None if none is given."""
    names = _listed("--dtype", settings.dtype, str)
    return weight_format(names[0]).name if names else None


def engine_axes(settings: recommend.AxisSettings, shape: ModelShape) -> dict[str, tuple[Any, ...]]:
    """The values of each engine setting to choose from, by the field of `EngineSetting`."""
    draft = planned_speculation(settings.speculation, shape)
    axes: dict[str, tuple[Any, ...]] = {"speculation": () if draft is None else (None, draft)}
    for name, (option, read) in _AXES.items():
        flag = f"--{option.replace('_', '-')}"
        axes[name] = _listed(flag, getattr(settings, option), read)
    return axes


def _listed(flag: str, text: str | None, read: Callable[[str], Any]) -> tuple[Any, ...]:
    if text is None:
        return ()
    try:
        return tuple(read(part.strip()) for part in text.split(","))
    except ValueError:
        kind = {int: "whole numbers", float: "numbers", _on_off: "on, off or both"}.get(read)
        raise InputError(f"{flag} {text}: write {kind or 'names'} between commas") from None


def _on_off(word: str) -> bool:
    if word.lower() not in ("on", "off"):
        raise ValueError(word)
    return word.lower() == "on"


_AXES: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {  # fields with their option
    "dtype": ("dtype", str),
    "kv_dtype": ("kv_dtype", str),
    "max_batch_size": ("max_batch", int),
    "max_prefill_tokens": ("prefill_tokens", int),
    "chunked_prefill": ("chunked_prefill", _on_off),
    "memory_share": ("memory_share", float),
    "cuda_graphs": ("graphs", _on_off),
    "copies": ("replicas", int),
    "expert_parallel": ("ep", _on_off),
    "dp_attention": ("dp_attention", _on_off),
    "pipeline": ("pp", int),
    "hosts": ("hosts", int),
}


def workload_of(scenario: Scenario, source: str, shape: ModelShape, dtype: str) -> Workload:
    """A scenario's workload, of that model in that number format.

    source  names the scenario in an error

    Raises InputError if the lengths of its requests are unknown.
    """
    load = scenario.load
    repeats = repeats_text(scenario) and scenario.workload.conversations is None
    planned = PlannedPrompts(scenario) if repeats else None
    kinds = tuple(_kinds(scenario, source, planned))
    more: dict[str, Any] = {
        "burstiness": load.burstiness if load.arrivals == "gamma" else 1.0,
        "traffic": None if planned is None else PrefixTraffic(planned.at),
    }
    if len(kinds) == 1:
        return Workload(shape, dtype, kinds[0].input_tokens, kinds[0].output_tokens, **more)
    return Workload.mixed(shape, dtype, kinds, **more)


def described_scenario(settings: recommend.RecommendSettings) -> Scenario:
    """The workload that options describe by what prompts have in common, as a scenario."""
    if settings.users is not None:
        raise InputError("prompts with a prefix cache are planned for a --rate, not for --users")
    stated = {name: value for name, value in prompt_fields(settings).items() if value is not None}
    engine = stated_settings(settings.host_cache)
    return parse_scenario({"workload": stated, "engine": engine}, source="the workload")


def prompt_fields(settings: PredictSettings | recommend.RecommendSettings) -> dict[str, Any]:
    """What options state of the prompts, by the names of a scenario's workload."""
    names = ("input_tokens", "output_tokens", "shared_prefix", "documents", "turns")
    trace = None if settings.trace is None else str(settings.trace)
    more = {"trace": trace, "think_s": settings.think_time}
    return {name: getattr(settings, name) for name in names} | more


def with_prefix_hits(workload: Workload, settings: recommend.RecommendSettings, load: Load | None) -> Workload:
    """The workload with the stated share of cached prompt tokens, or the traffic of that load."""
    if workload.traffic is not None:
        rate_per_s = None if load is None else load.rate_per_s
        keeps = settings.router.replace("_", "-") == "prefix-affine"
        traffic = replace(workload.traffic, rate_per_s=rate_per_s, keeps=keeps)
        return replace(workload, traffic=traffic)
    cached = min(int(settings.prefix_hit * workload.input_tokens), workload.input_tokens - 1)
    return replace(workload, cached_tokens=cached)


def _kinds(scenario: Scenario, source: str, planned: PlannedPrompts | None) -> Iterator[RequestKind]:
    workload = scenario.workload
    if workload.conversations is not None or workload.dataset is not None:
        raise InputError(
            f"{source}: a plan needs lengths: give equal requests, mix, input_lengths, turns or a "
            "trace, not recorded conversations or a dataset"
        )
    if workload.turns is not None and planned is not None:
        drawn = map(planned.at(1.0), range(_MOST_KINDS))
        yield from _thinned([(each.input_tokens, each.output_tokens) for each in drawn])
    elif workload.mix:
        for kind in workload.mix:
            yield RequestKind(kind.input_tokens, kind.output_tokens, kind.share)
    elif workload.trace is not None:
        requests = read_trace(Path(workload.trace)).requests
        yield from _thinned([(each.input_tokens, each.output_tokens) for each in requests])
    elif workload.input_lengths is not None or workload.output_lengths is not None:
        draw = random.Random(_SEED)
        inputs = parse_lengths(workload.input_lengths or str(workload.input_tokens))
        outputs = parse_lengths(workload.output_lengths or str(workload.output_tokens))
        yield from _thinned([(inputs.draw(draw), outputs.draw(draw)) for _ in range(_MOST_KINDS)])
    else:
        yield RequestKind(workload.input_tokens, workload.output_tokens, 1.0)


def _thinned(pairs: Sequence[tuple[int, int]]) -> Iterator[RequestKind]:
    """Every n-th of the pairs in order of length, so that at most _MOST_KINDS remain."""
    step = -(-len(pairs) // _MOST_KINDS)
    for input_tokens, output_tokens in sorted(pairs)[step // 2 :: step]:
        yield RequestKind(input_tokens, output_tokens, 1.0)


def rate_of(scenario: Scenario) -> float | None:
    """The highest rate of a scenario, req/s; None for a closed loop."""
    if scenario.load.rate_per_s is not None:
        turns = parse_lengths(scenario.workload.turns or "1").mean
        return max(scenario.load.rate_per_s) * turns
    if scenario.workload.trace is not None and scenario.load.concurrency is None:
        return read_trace(Path(scenario.workload.trace)).rate_per_s * max(scenario.load.speed)
    return None
