"""Which setting has an effect on which kind of target: a table of rules to refuse or to note.

An option of the command line without effect is refused. A scenario file may hold settings for
several kinds of target: a setting without effect is noted there, or refused if the figures would
be those of another engine than the file describes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Stated, flag_of
from lmi_bench.core.scenario import (
    SAGEMAKER_PREFIX,
    SIMULATED_PREFIX,
    ClientSection,
    EngineSection,
    SageMakerSection,
    Scenario,
)
from lmi_bench.core.scenario_fields import Fields
from lmi_bench.core.slo import Slo
from lmi_bench.engine.quantization import parse_scheme

Kind = Literal["bundled", "simulated", "url", "sagemaker"]
_RECORDED: Final = ("tensor_parallel", "dtype")
"""Accepted for any server: the run records them for a later calibration."""
_OF_TOKENS: Final = (
    *("workload.output_tokens", "workload.output_lengths", "workload.ignore_eos", "stream"),
    *("workload.turns", "workload.conversations", "client.first_token_timeout_s"),
)
_COMPUTED_DTYPES: Final = ("float32", "bfloat16", "float16")
_OPTIONS: Final = {
    each.place: each.option.name_of(each.name).partition("/")[0]
    for group in Fields.__subclasses__()
    for each in Stated(group).settings()
} | {"stream": "--no-stream"}


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings that have an effect only on some kinds of target, or only with another setting.

    purpose  ends the sentence "NAME is for ..."
    on       kinds of target
    needs    condition on the engine's other settings
    mend     what to do about an option that is refused
    always   refused in a scenario file, too: the engine would be another than the file describes
    """

    names: tuple[str, ...]
    purpose: str
    on: tuple[str, ...]
    needs: Callable[[EngineSection], bool]
    mend: str
    always: bool


def runs_on_gpu(engine: EngineSection) -> bool:
    """True if the settings put the engine on a GPU."""
    return engine.device == "cuda" or engine.backend == "triton"


def _prepares_steps(engine: EngineSection) -> bool:
    graphs = runs_on_gpu(engine) and not engine.enforce_eager
    return engine.compile or engine.artefact is not None or graphs


_NEEDS: Final[Mapping[str, Callable[[EngineSection], bool]]] = {
    "": lambda _: True,
    "draft": lambda engine: engine.draft is not None,
    "dynamic": lambda engine: engine.policy == "dynamic",
    "prefixes": lambda engine: bool(engine.prefix_caching),
    "rolling": lambda engine: engine.policy == "rolling",
    "ranks": lambda engine: engine.tensor_parallel not in (None, 1),
    "replicas": lambda engine: engine.replicas > 1,
    "memory": lambda engine: engine.num_blocks is None,
    "smoothquant": lambda engine: engine.quantize == "smoothquant",
    "calibrated": lambda engine: parse_scheme(engine.quantize).calibrated,
    "prepared": _prepares_steps,
    "gpu": runs_on_gpu,
}


def _rules() -> Iterator[Rule]:
    """The table of effects, in its order."""
    fields = {
        "engine.*": set(EngineSection.model_fields) - set(_RECORDED),
        "client.*": ClientSection.model_fields,
        "sagemaker.*": SageMakerSection.model_fields,
    }
    for row in read_rows("setting_effects.csv", "targets"):
        names: list[str] = []
        for name in row["names"].split():
            names += [name[:-1] + each for each in fields.get(name, ())] or [name]
        on = tuple(row["on"].split()) or get_args(Kind)
        needs, always = _NEEDS[row["needs"]], row["always"] == "yes"
        yield Rule(tuple(names), row["purpose"], on, needs, row["mend"], always=always)


RULES: Final = tuple(_rules())


def kind_of(target: str) -> Kind:
    """The kind of a scenario's target; an unknown name counts as the bundled engine."""
    if target.startswith(SIMULATED_PREFIX):
        return "simulated"
    if target.startswith(SAGEMAKER_PREFIX):
        return "sagemaker"
    return "url" if "://" in target else "bundled"


def refuse_idle(kind: Kind, stated: Iterable[str], engine: EngineSection) -> None:
    """Raise InputError for the first option that has no effect.

    stated  settings that were given as options: dotted names, as in a scenario
    """
    for name, rule in _idle(kind, stated, engine):
        raise _refusal(name, rule)


def refuse_impossible(kind: Kind, engine: EngineSection) -> None:
    """Raise InputError for a setting that this kind of engine cannot have."""
    for name, rule in _idle(kind, _differing(engine, "engine."), engine):
        if rule.always:
            raise _refusal(name, rule)
    if kind == "bundled" and engine.dtype not in (None, *_COMPUTED_DTYPES):
        raise InputError(
            f"--dtype {engine.dtype}: the bundled engine takes {', '.join(_COMPUTED_DTYPES)}; "
            "quantize its weights with --quantize"
        )


def idle_in_engine(kind: Kind, engine: EngineSection) -> tuple[str, ...]:
    """A line that names the engine's settings without effect; none if all have one."""
    return _line("engine settings", _idle(kind, _differing(engine, "engine."), engine))


def idle_beside_engine(scenario: Scenario) -> tuple[str, ...]:
    """Like `idle_in_engine`, for a scenario's settings of connections and of SageMaker."""
    names = [
        *(name for name in ("protocol", "stream") if _differs(scenario, name)),
        *_differing(scenario.client, "client."),
        *_differing(scenario.sagemaker, "sagemaker."),
    ]
    return _line("settings", _idle(kind_of(scenario.target), names, scenario.engine))


def refuse_tokens(stated: Iterable[str], limits: Iterable[Slo]) -> None:
    """Raise InputError for the first option or limit that needs tokens in an answer."""
    found = [option_of(name) for name in stated if name in _OF_TOKENS]
    found += [str(limit) for limit in limits if limit.metric != "e2e"]
    if found:
        raise InputError(f"{found[0]}: an embedding has no tokens: leave it out, or limit e2e (e2e_p90<=1s)")


def refuse_load(stated: Collection[str], scenario: Scenario) -> None:
    """Raise InputError for the first option of the load that another one leaves without effect."""
    load, workload = scenario.load, scenario.workload
    is_open = load.rate_per_s is not None or load.search == "rate"
    recorded = workload.trace is not None and load.concurrency is None and not is_open
    closed = not (is_open or recorded)
    timed = workload.trace is not None and load.rate_per_s is not None
    of_user, speed = "load.requests_per_user", "load.speed"
    idle = [
        (of_user, not closed, "is for users that wait (--concurrency): --requests-per-level here"),
        (of_user, load.duration_s is not None, "and --duration both end a level: leave one out"),
        (speed, not recorded, "is for a --trace as recorded: leave out --rate and --concurrency"),
        ("load.burstiness", load.arrivals != "gamma", "is of gamma arrivals: leave --arrivals out"),
        *(
            (f"load.{name}", timed or not is_open, "is for arrivals at a rate: give --rate (a --trace has its own)")
            for name in ("arrivals", "burstiness", "ramp_s")
        ),
    ]
    for name, is_idle, why in idle:
        if is_idle and name in stated:
            raise InputError(f"{option_of(name)} {why}")


def option_of(name: str) -> str:
    """The command-line option of a setting, given its dotted name."""
    return _OPTIONS.get(name) or flag_of(name)


def _idle(kind: Kind, names: Iterable[str], engine: EngineSection) -> Iterator[tuple[str, Rule]]:
    """The names without effect, each with the first rule that says so."""
    for name in names:
        for rule in RULES:
            if name in rule.names and not (kind in rule.on and rule.needs(engine)):
                yield name, rule
                break


def _refusal(name: str, rule: Rule) -> InputError:
    return InputError(f"{option_of(name)} is for {rule.purpose}; {rule.mend}")


def _line(what: str, idle: Iterable[tuple[str, Rule]]) -> tuple[str, ...]:
    by_purpose: dict[str, list[str]] = {}
    for name, rule in idle:
        by_purpose.setdefault(rule.purpose, []).append(name.rpartition(".")[2])
    found = [f"{', '.join(names)} (for {purpose})" for purpose, names in by_purpose.items()]
    return (f"{what} without effect here: {'; '.join(found)}",) if found else ()


def _differing(section: Any, prefix: str) -> list[str]:
    return [prefix + name for name in type(section).model_fields if _differs(section, name)]


def _differs(section: Any, name: str) -> bool:
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def stated_names(overrides: Mapping[str, Any]) -> list[str]:
    """Names of the settings that were given as options; streaming, the default, does not count."""
    return [name for name, value in overrides.items() if value is not None and not (name == "stream" and value is True)]
