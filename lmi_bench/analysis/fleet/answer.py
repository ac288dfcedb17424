"""The planner's answer: candidates with intervals, rejections with reasons, and its JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from lmi_bench.analysis.fit.from_run import LevelAccuracy
from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.money import Cost
from lmi_bench.analysis.level.layouts import Layout, Rejection, RequestKind
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.core.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_SLO_MISSED, InputError
from lmi_bench.core.json_value import OPTIONAL, JsonValue, check_types, key_of
from lmi_bench.core.level import QUANTILES
from lmi_bench.core.slo import Slo, parse_slo

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

    @classmethod
    def of(cls, slo: Slo, figure: Estimate | None, *, measured: bool = False) -> Self:
        """The outlook of a predicted figure in ms; None: it is withheld.

        measured  a level at this load or above kept the SLO
        """
        confidence = "missed"
        if measured:
            confidence = "measured"
        elif figure is not None and figure.high <= slo.limit_ms:
            confidence = "sure"
        elif figure is not None and figure.value <= slo.limit_ms:
            confidence = "likely"
        value_ms = None if figure is None else figure.value
        slack_ms = None if figure is None else slo.limit_ms - figure.value
        return cls(str(slo), value_ms, slo.limit_ms, slack_ms, confidence)


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
    prefix_hit_share    of the prompt tokens that the prefix cache held, 0 to 1
    """

    joint_attainment: float | None = None
    attainment: Mapping[str, float | None] = field(default_factory=dict)
    fifteen_minutes_ms: Mapping[str, float | None] = field(default_factory=dict)
    worst_5_minutes_ms: Mapping[str, float | None] = field(default_factory=dict)
    requests: int = 0
    minutes: float = 0.0
    routing: str = "random"
    reason: str | None = None
    prefix_hit_share: Estimate | None = field(default=None, metadata=OPTIONAL)

    @property
    def fragile_slos(self) -> list[str]:
        """SLOs on a quantile that fewer requests meet for themselves than the quantile promises.

        A pooled p90 of gaps may stand just below a step that a quarter of the requests miss.
        """
        return [
            text
            for text, share in self.attainment.items()
            if share is not None and share < QUANTILES.get(parse_slo(text).statistic, 0.0) - 0.02
        ]


@dataclass(frozen=True, slots=True)
class InputPrices(JsonValue):
    """USD per 1M prompt tokens at saturation, by the time of a copy that one more takes.

    computed      without a prefix cache's hit, the reads of its cache while decoding included
    cached        found in the prefix cache
    cached_share  of the prompt tokens, as planned
    """

    computed: float
    cached: float
    cached_share: float


@dataclass(frozen=True, slots=True)
class Candidate(JsonValue):
    """A fleet that carries the load; in the file each figure is a key of its own.

    instances   machines; copies: of the model on each
    limited_by  the limit of a copy: kv_memory, batch_limit, compute, bandwidth, host, link, or the
                SLO
    basis       `simulated` or `closed form`
    figures     predicted figures; None: withheld, for the reason in `withheld`
    attainment  of the SLOs, where the load was simulated for fifteen minutes
    setting     differences of the engine from the question
    """

    instance: str
    instances: int
    tensor_parallel: int
    copies: int = field(metadata=key_of("replicas"))
    accelerator: str
    price_usd_per_hour: float | None
    usd_per_month: float | None
    usd_per_1m_output_tokens: float | None
    usd_per_1m_total_tokens: float | None
    usd_per_1m_output_tokens_at_saturation: float | None
    usd_per_1m_total_tokens_at_saturation: float | None
    usd_per_1m_input_tokens: InputPrices | None = field(default=None, metadata=OPTIONAL, kw_only=True)
    blended_3to1_as_published: float | None
    blended_reason: str | None = field(metadata=key_of("blended_3to1_as_published_reason"))
    figures: Mapping[str, Estimate | None]
    slos: tuple[SloOutlook, ...]
    memory: MemoryUse
    limited_by: str
    basis: str
    price_provenance: str | None = field(metadata=key_of("price_source"))
    cost: Cost
    attainment: Attainment | None
    setting: EngineSetting
    profile_provenance: str = field(metadata=key_of("profile"))
    warnings: tuple[str, ...] = ()
    reason: str = ""
    withheld: Mapping[str, str] = field(default_factory=dict)

    @property
    def price_range_usd_per_hour(self) -> tuple[float, float] | None:
        """Range of the fleet's estimated price; None if the price is stated or unknown."""
        between = self.cost.machine_price_range_usd_per_hour
        hours = self.cost.paid_machine_hours_per_hour
        if between is None or hours is None:
            return None
        return between[0] * hours, between[1] * hours

    @property
    def meets_slos(self) -> bool:
        """Whether every SLO is expected to hold."""
        return all(outlook.confidence != "missed" for outlook in self.slos)

    def rejected(self, reason: str) -> Rejection:
        """This candidate as a layout that is out."""
        setting = self.setting.describe() or None
        return Rejection(self.instance, self.tensor_parallel, self.copies, reason, setting=setting)

    def to_json(self) -> dict[str, Any]:
        """The candidate as plain values; a figure is `{predicted, low, high}`, with a `reason` if
        it is withheld."""
        content: dict[str, Any] = {}
        for key, value in super(Candidate, self).to_json().items():
            if key == "figures":
                for name, figure in self.figures.items():
                    blank = {"predicted": None, "low": None, "high": None}
                    reason = {"reason": self.withheld.get(name)}
                    content[name] = blank | reason if figure is None else figure.to_json()
            elif key == "setting":
                content |= {"engine": self.setting.describe() or None, key: self.setting.to_json()}
            elif key != "withheld":
                content[key] = {} if key == "attainment" and value is None else value
            if key == "price_usd_per_hour":
                between = self.price_range_usd_per_hour
                content["estimated"] = between is not None
                content["price_range_usd_per_hour"] = None if between is None else list(between)
        return content

    @classmethod
    def from_json(cls, content: object, where: str = "a candidate") -> Self:
        """Inverse of `to_json`; raises InputError, KeyError or TypeError for anything else."""
        known: dict[str, Any] = {"figures": {}, "withheld": {}}
        if not isinstance(content, Mapping):
            raise TypeError(f"{where} is {content!r}")
        for name, value in content.items():
            if not isinstance(value, Mapping) or "predicted" not in value:
                known[name] = value
            elif value["predicted"] is None:
                known["figures"][name], known["withheld"][name] = None, value["reason"]
            else:
                known["figures"][name] = Estimate.from_json(value, name)
        for name in ("capacity_rate_per_s", "throughput_tokens_per_s"):
            if name not in known["figures"]:
                raise InputError(f"{where}: {name} must be an object with `predicted`")
        known["attainment"] = known["attainment"] or None
        known["setting"] = EngineSetting.from_json(known["setting"])
        # keys that follow from others, such as `estimated`, are no fields, and so not written again
        return cls(**cls._read(known, where) | {"file_keys": None})


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
    blended_ratio: float = 3.0
    interval: str = "80 %"

    @property
    def states_load(self) -> bool:
        """Whether a rate or users were stated; else one machine is loaded up to its limits."""
        return self.rate_per_s is not None or self.users is not None


@dataclass(frozen=True, slots=True)
class LoadInterval(JsonValue):
    """Loads above `from_per_s` up to `to_per_s` for which one layout costs least."""

    from_per_s: float
    to_per_s: float
    instance: str
    tensor_parallel: int
    copies: int
    fewest_machines: int
    most_machines: int
    least_usd_per_hour: float
    most_usd_per_hour: float


@dataclass(frozen=True, slots=True)
class Variation(JsonValue):
    """Winners by load. crossovers: the rates between intervals; their lower end is planned with."""

    intervals: tuple[LoadInterval, ...]
    crossovers: tuple[Estimate, ...] = field(default=(), metadata=key_of("crossovers_per_s"))


_RATE_UNKNOWN = "the rate is not known (add --rate):"
_LENGTHS_ASSUMED = "the lengths are assumed, not measured"
PRICE_ESTIMATED = "the price is an estimate (~):"
PRICE_UNKNOWN = "no price is known for"


@dataclass(frozen=True, slots=True)
class Measurement(JsonValue):
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
        content, layout = super(Measurement, self).to_json(), self.layout
        del content["layout"]
        return {"instance": layout.instance.instance_type, "tensor_parallel": layout.tensor_parallel, **content}


@dataclass(frozen=True, slots=True)
class Recommendation(JsonValue):
    """The answer: `recommended`, or None with `nearest` where no candidate keeps the SLOs.

    missed        limit that no candidate keeps: `the SLOs`, `the budget`, or `the load` where no
                  fleet carries it although a lone request keeps the SLOs; None if recommended
    candidates    fleets that carry the load within the SLOs, the best first
    accuracy      predictions of the levels that the profile was calibrated on, against them
    measure_next  levels that would decide or confirm, the most informative first
    """

    question: Question
    recommended: Candidate | None
    nearest: Candidate | None
    missed: str | None = field(default=None, kw_only=True)
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    warnings: tuple[str, ...] = ()
    accuracy: tuple[LevelAccuracy, ...] | None = None
    measure_next: tuple[Measurement, ...] = ()

    def with_caveats(self, *, lengths_assumed: bool) -> "Recommendation":
        """The answer with warnings, the first ones, that its question was not whole."""
        question, caveats = self.question, []
        if not question.states_load:
            caveats.append(f"{_RATE_UNKNOWN} the answer is for {question.load}")
        if lengths_assumed:
            lengths = f"{question.input_tokens} in / {question.output_tokens} out"
            caveats.append(f"{_LENGTHS_ASSUMED} ({lengths}): every figure depends on them")
        return replace(self, warnings=(*caveats, *self.warnings))

    @property
    def caveats(self) -> tuple[str, ...]:
        """The warnings that the first lines of every answer repeat."""
        begin = (_RATE_UNKNOWN, _LENGTHS_ASSUMED, PRICE_ESTIMATED, PRICE_UNKNOWN)
        return tuple(text for text in self.warnings if text.startswith(begin))

    @property
    def exit_code(self) -> int:
        """99 where the SLOs are out of reach, 2 where the model fits on none of the machines."""
        if self.recommended is not None:
            return EXIT_DONE
        return EXIT_SLO_MISSED if self.nearest is not None else EXIT_BAD_INPUT

    def to_json(self) -> dict[str, Any]:
        """The whole answer as plain values; the question's are its own keys."""
        content = super(Recommendation, self).to_json()
        levels = content["accuracy"]
        content["accuracy"] = None if levels is None else {"levels": levels}
        return {"schema_version": SCHEMA_VERSION, **content.pop("question"), **content}

    @classmethod
    def from_json(cls, content: object, where: str = "the recommendation") -> Self:
        """Inverse of `to_json`, without levels to measure. Raises InputError."""
        try:
            if not isinstance(content, Mapping):
                raise TypeError(f"{where} is {content!r}")
            if content["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"it has schema version {content['schema_version']}")
            own = [name for name in cls.slots() if name not in ("question", "measure_next")]
            known: dict[str, Any] = {name: content[name] for name in own}
            check_types(cls, {name: known[name] for name in ("warnings", "missed")}, where)
            known["question"] = {k: v for k, v in content.items() if k in Question.slots()}
            known["accuracy"] = known["accuracy"] and known["accuracy"]["levels"]
            return cls(**cls._read(known, where) | {"file_keys": None})
        except KeyError as exc:
            raise InputError(f"a recommendation without {exc}: {_AGAIN}") from exc
        except (TypeError, ValueError, AttributeError, InputError) as exc:
            raise InputError(f"not a recommendation as this version writes it, {exc}: {_AGAIN}") from exc
