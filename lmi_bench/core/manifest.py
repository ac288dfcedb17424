"""A run's manifest.json: what was run where. A value that a run does not state is empty or None."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmi_bench.core.durable import parsed_json, read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import OPTIONAL, JsonValue
from lmi_bench.core.load import LoadAxis

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunWorkload(JsonValue):
    """The fields of a run's workload that are read back."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    mix: Sequence[Mapping[str, Any]] = ()
    dataset: str | None = None
    input_lengths: str | None = None
    output_lengths: str | None = None
    trace: str | None = None
    turns: str | None = None
    conversations: str | None = None
    agents: str | None = field(default=None, metadata=OPTIONAL)
    agent_trace: str | None = field(default=None, metadata=OPTIONAL)
    idle_cap_s: float | None = field(default=None, metadata=OPTIONAL)
    begins_within: bool = False
    ignore_eos: bool = True
    reuse_prompts: bool = False


@dataclass(frozen=True, slots=True)
class RunLoad(JsonValue):
    """The fields of a run's load that are read back."""

    concurrency: Sequence[int] | str | None = None
    rate_per_s: Sequence[float] | None = None
    search: str | None = None
    arrivals: str | None = None
    burstiness: float = 1.0
    ramp_s: float = 0.0
    max_sessions: int | None = None
    max_in_flight: int | None = None

    @property
    def is_picked(self) -> bool:
        """Whether a rule picked the levels, so that each run has its own."""
        return self.search is not None or self.concurrency == "auto"

    @property
    def listed(self) -> Sequence[tuple[LoadAxis, float]]:
        """Axis and value of each level that is listed; empty where a rule picked the levels."""
        users = () if isinstance(self.concurrency, str) else self.concurrency or ()
        found: list[tuple[LoadAxis, float]] = [("concurrency", each) for each in users]
        found += [("rate_per_s", each) for each in self.rate_per_s or ()]
        return [] if self.is_picked else found


@dataclass(frozen=True, slots=True)
class RunEngine(JsonValue):
    """The fields of a run's engine settings that are read back."""

    dtype: str | None = None
    tensor_parallel: int | str | None = None
    draft: str | None = None
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunScenario(JsonValue):
    """The scenario that a run began with; an imported run states a few of its values only."""

    name: str = ""
    target: str = ""
    model: str = ""
    protocol: str | None = None
    stream: bool = True
    workload: RunWorkload = RunWorkload(file_keys=())
    load: RunLoad = RunLoad(file_keys=())
    engine: RunEngine = RunEngine(file_keys=())
    seed: int | None = None
    slo: Sequence[str] = ()
    unrecorded: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SchedulerFacts(JsonValue):
    """The fields of a bundled or simulated engine's scheduler that are read back."""

    num_blocks: int
    block_size: int
    kv_layout: str
    max_rolling_batch_size: int
    max_rolling_batch_prefill_tokens: int
    chunked_prefill: bool


@dataclass(frozen=True, slots=True)
class TargetFacts(JsonValue):
    """What is known about a run's target; each kind of target states some of it.

    kind       engine (bundled), simulated, http, sagemaker or imported
    instances  of a SageMaker endpoint; replicas: of the bundled or simulated engine
    layout     of an imported run beyond its tensor-parallel degree, such as `EP, MTP 3`
    """

    kind: str = ""
    model: str | None = None
    instance: str | None = None
    instances: int | None = None
    accelerator: str | None = None
    n_accelerators: int | None = None
    tensor_parallel: int | None = None
    replicas: int = 1
    dtype: str | None = None
    kv_dtype: str | None = None
    profile: str | None = None
    profile_provenance: str | None = None
    back_end: str | None = None
    server: str | None = None
    layout: str | None = field(default=None, metadata=OPTIONAL)
    scheduler: SchedulerFacts | None = None

    @property
    def is_bundled(self) -> bool:
        """Whether the bundled engine was measured, in the sweep's own process."""
        return self.kind == "engine"

    @property
    def is_simulated(self) -> bool:
        """Whether the run's times were predicted by the step-time model instead of measured."""
        return self.kind == "simulated"

    @property
    def engine(self) -> str:
        """The engine's name and version, if stated."""
        stated = {"simulated": self.profile, "imported": self.back_end}
        return stated.get(self.kind, self.server) or ""

    @property
    def copies(self) -> int | None:
        """Replicas of the bundled or simulated engine, or instances of a SageMaker endpoint."""
        return self.replicas if self.kind in ("engine", "simulated") else self.instances or None


@dataclass(frozen=True, slots=True)
class RecordedSessions(JsonValue):
    """The recorded agent sessions of a run; kind: weka, bailian, otel, or several."""

    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Manifest(JsonValue):
    """The content of manifest.json.

    created_at     ISO 8601, UTC
    scenario_hash  SHA-256 of what decides the measurement (`Scenario.hash`)
    commands       command lines that began and resumed the run
    salt           of the prompts; goodput: SLOs of a good request
    imported_from  the tool that measured an imported run, with notes on what its files lack
    """

    schema_version: int = SCHEMA_VERSION
    created_at: str = ""
    scenario: RunScenario = RunScenario(file_keys=())
    scenario_hash: str = ""
    target: TargetFacts = TargetFacts(file_keys=())
    host: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Sequence[str]] = ()
    salt: str | None = field(default=None, metadata=OPTIONAL)
    sessions: RecordedSessions | None = field(default=None, metadata=OPTIONAL)
    goodput: Sequence[str] | None = field(default=None, metadata=OPTIONAL)
    imported_from: str | None = field(default=None, metadata=OPTIONAL)
    notes: Sequence[str] | None = field(default=None, metadata=OPTIONAL)

    @property
    def model(self) -> str:
        """The name of the model at the target; empty if unknown."""
        return self.target.model or self.scenario.model

    @property
    def label(self) -> str:
        """The run's name, else its model and target; empty if it states neither."""
        parts = filter(None, (self.scenario.model, self.scenario.target))
        return self.scenario.name or " on ".join(parts)


def read_manifest(file: Path) -> Manifest:
    """Read manifest.json; raises InputError if it is damaged or of a newer version."""
    try:
        content = parsed_json(read_text(file))
    except ValueError as exc:
        raise InputError(f"cannot read {file}: {exc}") from exc
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise InputError(f"{file} states no schema_version: it is no run of lmi-bench")
    if version > SCHEMA_VERSION:
        raise InputError(
            f"{file.parent} has schema version {version}; this lmi-bench reads up to "
            f"{SCHEMA_VERSION}: install a newer one"
        )
    return Manifest.from_json(content, str(file))
