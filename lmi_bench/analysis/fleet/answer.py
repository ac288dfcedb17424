"""The planner's answer as a value: candidates with intervals, rejections with reasons, its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.level.layouts import Layout, Rejection, RequestKind
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.analysis.model.speculation import Speculation
from lmi_bench.catalog.models import find_model
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

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file; slack_ms is what is left to the limit."""
        slack = None if self.predicted_ms is None else self.limit_ms - self.predicted_ms
        return {
            "slo": self.slo,
            "predicted_ms": self.predicted_ms,
            "limit_ms": self.limit_ms,
            "slack_ms": slack,
            "confidence": self.confidence,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SloOutlook:
        """What `to_json` wrote."""
        return cls(
            _read(content, "slo", str),
            _number(content, "predicted_ms"),
            _known(content, "limit_ms"),
            _read(content, "confidence", str),
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet that carries the load.

    instances            machines; copies: of the model on each
    figures              predicted figures; None: withheld, for the reason in `withheld`
    limited_by           what caps a copy: kv_memory, batch_limit, compute, bandwidth, host, link,
                         or the SLO
    basis                `simulated` or `closed form`
    cost                 how the price comes about: purchase, spare machines, the price's date
    attainment           share of requests within all SLOs, worst five minutes; of the best only
    setting              how the engine differs from what was asked with
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
        """As it stands in the file; a figure is `{predicted, low, high}`, with a `reason` where
        it is withheld."""
        return {
            "instance": self.instance,
            "instances": self.instances,
            "tensor_parallel": self.tensor_parallel,
            "replicas": self.copies,
            "accelerator": self.accelerator,
            "price_usd_per_hour": self.price_usd_per_hour,
            "usd_per_month": self.usd_per_month,
            "usd_per_1m_output_tokens": self.usd_per_1m_output_tokens,
            "usd_per_1m_total_tokens": self.usd_per_1m_total_tokens,
            "usd_per_1m_output_tokens_at_saturation": self.usd_per_1m_output_tokens_at_saturation,
            "usd_per_1m_total_tokens_at_saturation": self.usd_per_1m_total_tokens_at_saturation,
            "blended_3to1_as_published": self.blended_3to1_as_published,
            "blended_3to1_as_published_reason": self.blended_reason,
            **{name: self._figure_json(name) for name in self.figures},
            "slos": [outlook.to_json() for outlook in self.slos],
            "memory": dict(self.memory),
            "limited_by": self.limited_by,
            "basis": self.basis,
            "price_source": self.price_provenance,
            "cost": dict(self.cost),
            "attainment": dict(self.attainment),
            "engine": self.setting.describe() or None,
            "setting": self.setting.to_json(),
            "profile": self.profile_provenance,
            "warnings": list(self.warnings),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Candidate:
        """What `to_json` wrote; KeyError or TypeError for anything else."""
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
        return cls(
            instance=_read(content, "instance", str),
            instances=_read(content, "instances", int),
            tensor_parallel=_read(content, "tensor_parallel", int),
            copies=_read(content, "replicas", int),
            accelerator=_read(content, "accelerator", str),
            **{name: _number(content, name) for name in _PRICES},
            blended_reason=content["blended_3to1_as_published_reason"],
            figures=figures,
            withheld=withheld,
            slos=tuple(map(SloOutlook.from_json, _read(content, "slos", list))),
            memory=_read(content, "memory", dict),
            limited_by=_read(content, "limited_by", str),
            basis=_read(content, "basis", str),
            price_provenance=content["price_source"],
            profile_provenance=_read(content, "profile", str),
            warnings=tuple(_read(content, "warnings", list)),
            reason=_read(content, "reason", str),
            cost=_read(content, "cost", dict),
            attainment=_read(content, "attainment", dict),
            setting=_setting_of(_read(content, "setting", dict)),
        )


_PRICES = (
    "price_usd_per_hour",
    "usd_per_month",
    "usd_per_1m_output_tokens",
    "usd_per_1m_total_tokens",
    "usd_per_1m_output_tokens_at_saturation",
    "usd_per_1m_total_tokens_at_saturation",
    "blended_3to1_as_published",
)
_T = TypeVar("_T")


def _read(content: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = content[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key} is {value!r}")
    return value


def _number(content: Mapping[str, Any], key: str) -> float | None:
    return None if content[key] is None else _known(content, key)


def _known(content: Mapping[str, Any], key: str) -> float:
    value = content[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key} is {value!r}")
    return value


def _setting_of(content: Mapping[str, Any]) -> EngineSetting:
    """What `EngineSetting.to_json` wrote; raises InputError for a draft that is not known."""
    values = {**content, "copies": content["replicas"]}
    del values["replicas"]
    spoken = values["speculation"]
    if spoken is not None:
        draft = None if spoken["draft"] is None else find_model(spoken["draft"])
        acceptance = _known(spoken, "draft_acceptance")
        values["speculation"] = Speculation(_read(spoken, "draft_tokens", int), acceptance, draft)
    return EngineSetting(**values)


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, for the record and for what goes on from the answer.

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
        """As it stands in the file."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        kinds = [asdict(kind) for kind in self.kinds]
        return {**values, "kinds": kinds, "slos": list(self.slos), "interval": "80 %"}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Question:
        """What `to_json` wrote; KeyError or TypeError for anything else."""
        kinds = (
            RequestKind(
                _read(kind, "input_tokens", int),
                _read(kind, "output_tokens", int),
                _known(kind, "share"),
            )
            for kind in _read(content, "kinds", list)
        )
        words = ("load", "objective", "purchase", "availability", "profile")
        return cls(
            model=_read(content, "model", str),
            dtype=_read(content, "dtype", str),
            input_tokens=_read(content, "input_tokens", int),
            output_tokens=_read(content, "output_tokens", int),
            kinds=tuple(kinds),
            burstiness=_known(content, "burstiness"),
            rate_per_s=_number(content, "rate_per_s"),
            users=content["users"],
            think_time_s=_number(content, "think_time_s"),
            slos=tuple(_read(content, "slos", list)),
            **{name: _read(content, name, str) for name in words},
            calibrated=_read(content, "calibrated", bool),
            measured_loads=_read(content, "measured_loads", int),
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

    machines             of the fleet that it decides on, spare ones left out
    chance               that the SLOs are kept, 0 to 1
    saves_usd_per_hour   against the recommended fleet if they are; 0: it confirms that fleet
    """

    layout: Layout
    rate_per_s: float
    machines: int
    chance: float
    saves_usd_per_hour: float

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "instance": self.layout.instance.instance_type,
            "tensor_parallel": self.layout.tensor_parallel,
            "rate_per_s": self.rate_per_s,
            "machines": self.machines,
            "chance": self.chance,
            "saves_usd_per_hour": self.saves_usd_per_hour,
        }


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer: `recommended`, or None with `nearest` where no candidate keeps the SLOs.

    missed      what no candidate keeps where none is recommended: `the SLOs`, `the budget`, or
                `the load` where no fleet carries it although a lone request keeps the SLOs
    candidates  that carry the load within the SLOs, the best first
    question    what was asked
    accuracy    predicted against measured, level by level, where a sweep was calibrated on
    measure_next  levels that would decide or confirm, the most telling first
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
        """99 where the SLOs are out of reach, 2 where the model fits into none of the machines."""
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
        """What `to_json` wrote, but for the layouts that are out and the levels to measure, from
        which nothing goes on. Raises InputError for anything else."""
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
                rejected=(),
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

    def rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The candidates as rows of a table, the best first: plain values, None for unknown."""
        rows = [candidate_row(candidate) for candidate in self.candidates[:limit]]
        several = any(row["engine"] for row in rows)
        for row in rows:
            if several:
                row["engine"] = row["engine"] or "as given"
            else:
                del row["engine"]
        return rows


def candidate_row(candidate: Candidate) -> dict[str, Any]:
    """One candidate as a row; figures are their predicted values."""

    def value(name: str) -> float | None:
        figure = candidate.figures.get(name)
        return None if figure is None else figure.value

    return {
        "instance": candidate.instance,
        "machines": candidate.instances,
        "TP": candidate.tensor_parallel,
        "copies": candidate.copies,
        "engine": candidate.setting.describe(),
        "USD/h": candidate.price_usd_per_hour,
        "USD/1M out": candidate.usd_per_1m_output_tokens,
        "capacity req/s": value("capacity_rate_per_s"),
        "tok/s": value("throughput_tokens_per_s"),
        "TTFT p90 ms": value("ttft_p90_ms"),
        "ITL p50 ms": value("itl_p50_ms"),
        "ms/token p90": value("latency_per_token_p90_ms"),
        "limited by": candidate.limited_by,
        "basis": candidate.basis,
    }
