"""The planner's answer: candidates with intervals, rejections with reasons, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmi_bench.analysis.fit.from_run import LevelAccuracy, accuracy_from_json, accuracy_json
from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.money import Cost
from lmi_bench.analysis.level.layouts import Layout, Rejection, RequestKind
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.core.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_SLO_MISSED, InputError
from lmi_bench.core.json_value import JsonValue
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.slo import parse_slo

SCHEMA_VERSION = 1
_AGAIN = "run recommend --json again"


@dataclass(frozen=True, slots=True)
class SloOutlook(JsonValue):
    """One SLO at the planned load.

    slack_ms    distance to the limit, below 0 where it is missed
    confidence  measured (a level at this load or above kept it), sure (holds at the interval's
                upper end), likely (holds as predicted) or missed
    """

    slo: str
    predicted_ms: float | None
    limit_ms: float
    slack_ms: float | None
    confidence: str


@dataclass(frozen=True, slots=True)
class MemoryUse(JsonValue):
    """Use of a device's memory in GiB, and sequences of a copy.

    mean_batch_per_copy  running sequences at the load
    """

    device_gib: float
    weights_gib: float
    kv_cache_gib: float
    sequences_guaranteed: int
    sequences_expected: int
    slots_per_copy: int
    mean_batch_per_copy: float


@dataclass(frozen=True, slots=True)
class Attainment(JsonValue):
    """SLO attainment by request and by window, of a simulated load.

    joint_attainment    share of requests that meet every SLO, 0 to 1; None without SLOs
    attainment          share of requests that meet each SLO for themselves
    fifteen_minutes_ms  each SLO's statistic over all requests; None with too few of them
    worst_5_minutes_ms  its highest value over five minutes; None if no window has enough requests
    reason              the reason why nothing was simulated
    """

    joint_attainment: float | None = None
    attainment: Mapping[str, float | None] = field(default_factory=dict)
    fifteen_minutes_ms: Mapping[str, float | None] = field(default_factory=dict)
    worst_5_minutes_ms: Mapping[str, float | None] = field(default_factory=dict)
    requests: int = 0
    minutes: float = 0.0
    routing: str = "random"
    reason: str | None = None

    @property
    def fragile_slos(self) -> list[str]:
        """SLOs on a quantile that fewer requests meet for themselves than the quantile promises.

        A pooled p90 of gaps may stand just below a step: it holds, and a quarter of the requests
        does not.
        """
        return [
            text
            for text, share in self.attainment.items()
            if share is not None and share < QUANTILES.get(parse_slo(text).statistic, 0.0) - 0.02
        ]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet that carries the load.

    instances   machines; copies: of the model on each
    figures     predicted figures; None: withheld, for the reason in `withheld`
    limited_by  the limit of a copy: kv_memory, batch_limit, compute, bandwidth, host, link, or the
                SLO
    basis       `simulated` or `closed form`
    attainment  of the fleets that were simulated for long, the best first; else None
    setting     differences of the engine from the question
    """

    instance: str
    instances: int
    tensor_parallel: int
    copies: int
    accelerator: str
    price_usd_per_hour: float | None
    usd_per_month: float | None
    usd_per_1m_output_tokens: float | None
    usd_per_1m_total_tokens: float | None
    usd_per_1m_output_tokens_at_saturation: float | None
    usd_per_1m_total_tokens_at_saturation: float | None
    blended_3to1_as_published: float | None
    blended_reason: str | None
    figures: Mapping[str, Estimate | None]
    withheld: Mapping[str, str]
    slos: tuple[SloOutlook, ...]
    memory: MemoryUse
    limited_by: str
    basis: str
    price_provenance: str | None
    profile_provenance: str
    cost: Cost
    warnings: tuple[str, ...] = ()
    reason: str = ""
    attainment: Attainment | None = None
    setting: EngineSetting = AS_STATED

    @property
    def meets_slos(self) -> bool:
        """Whether every SLO is expected to hold."""
        return all(outlook.confidence != "missed" for outlook in self.slos)

    def _figure_json(self, name: str) -> dict[str, Any]:
        figure = self.figures[name]
        if figure is not None:
            return dict(figure.to_json())
        return {"predicted": None, "low": None, "high": None, "reason": self.withheld[name]}

    def to_json(self) -> dict[str, Any]:
        """The candidate as plain values; a figure is `{predicted, low, high}`, with a `reason` if
        it is withheld."""
        return {
            **self._plain(*_MACHINES, *_PRICES, "blended_reason"),
            **{name: self._figure_json(name) for name in self.figures},
            "slos": [outlook.to_json() for outlook in self.slos],
            "memory": self.memory.to_json(),
            **self._plain("limited_by", "basis", "price_provenance"),
            "cost": self.cost.to_json(),
            "attainment": {} if self.attainment is None else self.attainment.to_json(),
            "engine": self.setting.describe() or None,
            "setting": self.setting.to_json(),
            **self._plain("profile_provenance"),
            "warnings": list(self.warnings),
            "reason": self.reason,
        }

    def _plain(self, *names: str) -> dict[str, Any]:
        return {_KEYS.get(name, name): getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Candidate:
        """Inverse of `to_json`; raises KeyError or TypeError for anything else."""
        figures: dict[str, Estimate | None] = {}
        withheld = {}
        for name, value in content.items():
            if isinstance(value, Mapping) and "predicted" in value:
                figures[name] = None
                if value["predicted"] is None:
                    withheld[name] = _read(value, "reason", str)
                else:
                    ends = (_known(value, key) for key in ("predicted", "low", "high"))
                    figures[name] = Estimate(*ends)
        attained = _read(content, "attainment", dict)
        prices: dict[str, Any] = {name: _number(content, name) for name in _PRICES}
        return cls(
            **_checked(content, _KINDS),
            **prices,
            blended_reason=content["blended_3to1_as_published_reason"],
            figures=figures,
            withheld=withheld,
            slos=tuple(SloOutlook.from_json(each, "slos") for each in _read(content, "slos", list)),
            memory=MemoryUse.from_json(content["memory"], "memory"),
            cost=Cost.from_json(content["cost"], "cost"),
            attainment=Attainment.from_json(attained, "attainment") if attained else None,
            price_provenance=content["price_source"],
            warnings=tuple(_read(content, "warnings", list)),
            setting=EngineSetting.from_json(_read(content, "setting", dict)),
        )


_MACHINES = ("instance", "instances", "tensor_parallel", "copies", "accelerator")
_PRICES = (
    "price_usd_per_hour",
    "usd_per_month",
    "usd_per_1m_output_tokens",
    "usd_per_1m_total_tokens",
    "usd_per_1m_output_tokens_at_saturation",
    "usd_per_1m_total_tokens_at_saturation",
    "blended_3to1_as_published",
)
_PROBE = ("rate_per_s", "machines", "chance", "saves_usd_per_hour")
_KEYS = {  # of the file, where they differ from the fields
    "copies": "replicas",
    "blended_reason": "blended_3to1_as_published_reason",
    "price_provenance": "price_source",
    "profile_provenance": "profile",
}
_KINDS: Mapping[type, tuple[str, ...]] = {
    str: ("instance", "accelerator", "limited_by", "basis", "profile_provenance", "reason"),
    int: ("instances", "tensor_parallel", "copies"),
}
_T = TypeVar("_T")


def _read(content: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = content[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key} is {value!r}")
    return value


def _checked(content: Mapping[str, Any], kinds: Mapping[type, tuple[str, ...]]) -> dict[str, Any]:
    """The fields of each type, by the keys of the file."""
    return {
        name: _read(content, _KEYS.get(name, name), kind)
        for kind, names in kinds.items()
        for name in names
    }


def _number(content: Mapping[str, Any], key: str) -> float | None:
    return None if content[key] is None else _known(content, key)


def _known(content: Mapping[str, Any], key: str) -> float:
    value = content[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key} is {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Question(JsonValue):
    """The question, for the record and for commands that continue from the answer.

    input_tokens, output_tokens  of each request, or with `kinds` their means
    load, purchase, availability, profile   for people
    """

    model: str
    dtype: str
    input_tokens: int
    output_tokens: int
    kinds: tuple[RequestKind, ...]
    burstiness: float
    rate_per_s: float | None
    users: int | None
    think_time_s: float | None
    load: str
    slos: tuple[str, ...]
    objective: str
    purchase: str
    availability: str
    profile: str
    calibrated: bool
    measured_loads: int
    interval: str = "80 %"

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max((kind.input_tokens for kind in self.kinds), default=self.input_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request, input and output."""
        sizes = (kind.input_tokens + kind.output_tokens for kind in self.kinds)
        return max(sizes, default=self.input_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True)
class Probe:
    """A level to measure: one copy at `rate_per_s`.

    machines             of the fleet that it decides on, without spare ones
    chance               probability that the SLOs are kept
    saves_usd_per_hour   against the recommended fleet if they are; 0: it confirms that fleet
    """

    layout: Layout
    rate_per_s: float
    machines: int
    chance: float
    saves_usd_per_hour: float

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.layout.instance.instance_type,
            "tensor_parallel": self.layout.tensor_parallel,
            **{name: getattr(self, name) for name in _PROBE},
        }


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer: `recommended`, or None with `nearest` where no candidate keeps the SLOs.

    missed        limit that no candidate keeps: `the SLOs`, `the budget`, or `the load` where no
                  fleet carries it although a lone request keeps the SLOs; None if recommended
    candidates    fleets that carry the load within the SLOs, the best first
    accuracy      predictions of the levels that the profile was calibrated on, against them
    measure_next  levels that would decide or confirm, the most informative first
    """

    recommended: Candidate | None
    nearest: Candidate | None
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    question: Question
    warnings: tuple[str, ...] = ()
    accuracy: tuple[LevelAccuracy, ...] | None = None
    measure_next: tuple[Probe, ...] = ()
    missed: str | None = None

    @property
    def exit_code(self) -> int:
        """99 where the SLOs are out of reach, 2 where the model fits on none of the machines."""
        if self.recommended is not None:
            return EXIT_DONE
        return EXIT_SLO_MISSED if self.nearest is not None else EXIT_BAD_INPUT

    def to_json(self) -> dict[str, Any]:
        """The whole answer as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            **self.question.to_json(),
            "recommended": None if self.recommended is None else self.recommended.to_json(),
            "nearest": None if self.nearest is None else self.nearest.to_json(),
            "missed": self.missed,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "rejected": [
                {
                    "instance": rejection.instance_type,
                    "tensor_parallel": rejection.tensor_parallel,
                    "replicas": rejection.copies,
                    "setting": rejection.setting.describe() or None,
                    "reason": rejection.reason,
                }
                for rejection in self.rejected
            ],
            "warnings": list(self.warnings),
            "accuracy": None if self.accuracy is None else accuracy_json(self.accuracy),
            "measure_next": [probe.to_json() for probe in self.measure_next],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recommendation:
        """Inverse of `to_json`, without levels to measure and the settings of rejected layouts.

        Raises InputError.
        """
        try:
            if content["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"it has schema version {content['schema_version']}")
            best, nearest = (
                None if content[name] is None else Candidate.from_json(content[name])
                for name in ("recommended", "nearest")
            )
            return cls(
                recommended=best,
                nearest=nearest,
                candidates=tuple(map(Candidate.from_json, _read(content, "candidates", list))),
                rejected=tuple(
                    Rejection(
                        _read(each, "instance", str),
                        each["tensor_parallel"],
                        each["replicas"],
                        _read(each, "reason", str),
                    )
                    for each in _read(content, "rejected", list)
                ),
                question=Question.from_json(
                    {key: content[key] for key in Question.slots()}, "the question"
                ),
                warnings=tuple(_read(content, "warnings", list)),
                accuracy=accuracy_from_json(content["accuracy"]),
                missed=content["missed"],
            )
        except KeyError as exc:
            raise InputError(f"a recommendation without {exc}: {_AGAIN}") from exc
        except (TypeError, ValueError, AttributeError) as exc:
            raise InputError(
                f"not a recommendation as this version writes it, {exc}: {_AGAIN}"
            ) from exc
