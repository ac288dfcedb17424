"""The planner's answer: candidates with intervals, rejections with reasons, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.level.layouts import Layout, Rejection, RequestKind
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.core.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_SLO_MISSED, InputError

SCHEMA_VERSION = 1
_AGAIN = "run recommend --json again"


@dataclass(frozen=True, slots=True)
class SloOutlook:
    """One SLO at the planned load.

    confidence  measured (a level at this load or above kept it), sure (holds at the interval's
                upper end), likely (holds as predicted) or missed
    """

    slo: str
    predicted_ms: float | None
    limit_ms: float
    confidence: str

    @property
    def slack_ms(self) -> float | None:
        """Distance to the limit, below 0 where it is missed."""
        return None if self.predicted_ms is None else self.limit_ms - self.predicted_ms

    def to_json(self) -> dict[str, Any]:
        """The outlook as plain values."""
        names = ("slo", "predicted_ms", "limit_ms", "slack_ms", "confidence")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SloOutlook:
        """Inverse of `to_json`."""
        return cls(
            _read(content, "slo", str),
            _number(content, "predicted_ms"),
            _known(content, "limit_ms"),
            _read(content, "confidence", str),
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet that carries the load.

    instances   machines; copies: of the model on each
    figures     predicted figures; None: withheld, for the reason in `withheld`
    limited_by  the limit of a copy: kv_memory, batch_limit, compute, bandwidth, host, link, or the
                SLO
    basis       `simulated` or `closed form`
    cost        parts of the price: purchase, spare machines, the price's date
    attainment  share of requests within all SLOs, worst five minutes; only of the best candidate
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
    memory: Mapping[str, float]
    limited_by: str
    basis: str
    price_provenance: str | None
    profile_provenance: str
    warnings: tuple[str, ...] = ()
    reason: str = ""
    cost: Mapping[str, Any] = field(default_factory=dict)
    attainment: Mapping[str, Any] = field(default_factory=dict)
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
            **self._plain(
                "memory", "limited_by", "basis", "price_provenance", "cost", "attainment"
            ),
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
        prices: dict[str, Any] = {name: _number(content, name) for name in _PRICES}
        return cls(
            **_checked(content, _KINDS),
            **prices,
            blended_reason=content["blended_3to1_as_published_reason"],
            figures=figures,
            withheld=withheld,
            slos=tuple(map(SloOutlook.from_json, _read(content, "slos", list))),
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
    dict: ("memory", "cost", "attainment"),
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
class Question:
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

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        kinds, slos = list(values["kinds"]), list(self.slos)
        return {**values, "kinds": kinds, "slos": slos, "interval": "80 %"}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Question:
        """Inverse of `to_json`; raises KeyError or TypeError for anything else."""
        kinds = (
            RequestKind(
                _read(kind, "input_tokens", int),
                _read(kind, "output_tokens", int),
                _known(kind, "share"),
            )
            for kind in _read(content, "kinds", list)
        )
        words = ("model", "dtype", "load", "objective", "purchase", "availability", "profile")
        counts = ("input_tokens", "output_tokens", "measured_loads")
        return cls(
            **_checked(content, {str: words, int: counts, bool: ("calibrated",)}),
            kinds=tuple(kinds),
            burstiness=_known(content, "burstiness"),
            rate_per_s=_number(content, "rate_per_s"),
            users=content["users"],
            think_time_s=_number(content, "think_time_s"),
            slos=tuple(_read(content, "slos", list)),
        )

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
    accuracy      prediction against measurement of each level of a calibration sweep
    measure_next  levels that would decide or confirm, the most informative first
    """

    recommended: Candidate | None
    nearest: Candidate | None
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    question: Question
    warnings: tuple[str, ...] = ()
    accuracy: Mapping[str, Any] | None = None
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
            "accuracy": self.accuracy,
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
                question=Question.from_json(content),
                warnings=tuple(_read(content, "warnings", list)),
                accuracy=content["accuracy"],
                missed=content["missed"],
            )
        except KeyError as exc:
            raise InputError(f"a recommendation without {exc}: {_AGAIN}") from exc
        except (TypeError, ValueError, AttributeError) as exc:
            raise InputError(
                f"not a recommendation as this version writes it, {exc}: {_AGAIN}"
            ) from exc
