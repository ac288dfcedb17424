"""The planner's answer as a value: candidates with intervals, rejections with reasons, its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.probe import Probe
from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.core.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_SLO_MISSED

SCHEMA_VERSION = 1


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


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer: `recommended`, or None with `nearest` where no candidate keeps the SLOs.

    missed      what no candidate keeps where none is recommended: `the SLOs`, `the budget`, or
                `the load` where no fleet carries it although a lone request keeps the SLOs
    candidates  that carry the load within the SLOs, the best first
    question    what was asked, for the record
    accuracy    predicted against measured, level by level, where a sweep was calibrated on
    measure_next  levels that would decide or confirm, the most telling first
    """

    recommended: Candidate | None
    nearest: Candidate | None
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    question: Mapping[str, Any]
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
            **self.question,
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
