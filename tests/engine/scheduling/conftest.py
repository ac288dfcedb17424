"""A driver that steps a scheduler over its own small clock: one second a step unless told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput, WaitUntil
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler

PLAIN = 7  # a token that ends nothing


@dataclass(frozen=True)
class Step:
    start_s: float
    batch: StepBatch

    @property
    def kinds(self) -> dict[int, str]:
        return {entry.seq_id: str(entry.kind) for entry in self.batch.entries}

    @property
    def prompt_tokens(self) -> int:
        return self.batch.shape.prefill_tokens


@dataclass
class Drive:
    """Runs requests (arrival_s, prompt, output tokens) through a scheduler to the last end."""

    scheduler: Scheduler
    step_s: float = 1.0
    now_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    token_times_s: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    max_steps: int = 20_000

    def add(self, seq_id: int, prompt: int, output: int, **sampling) -> None:
        self.scheduler.add(seq_id, range(prompt), SamplingParams(max_new_tokens=output, **sampling), self.now_s)

    def token(self, entry) -> tuple[int, ...]:
        return (PLAIN,) if entry.samples else ()

    def commit(self, batch: StepBatch) -> None:
        outputs = [StepOutput(entry.seq_id, self.token(entry)) for entry in batch.entries]
        for gained in self.scheduler.commit(batch, outputs, self.now_s):
            self.tokens.setdefault(gained.seq_id, []).extend(gained.token_ids)
            self.token_times_s.setdefault(gained.seq_id, []).append(self.now_s)
            if gained.finish_reason is not None:
                self.reasons[gained.seq_id] = gained.finish_reason
        self.scheduler.audit()

    def step(self) -> Step | None:
        planned = self.scheduler.plan(self.now_s)
        if not isinstance(planned, StepBatch):
            return None
        step = Step(self.now_s, planned)
        self.steps.append(step)
        self.now_s += self.step_s
        self.commit(planned)
        return step

    def run(self, requests=()) -> Drive:
        """Requests join at the boundary after their arrival, as they do in the engine."""
        waiting = list(enumerate(requests))
        while len(self.steps) < self.max_steps:
            while waiting and waiting[0][1][0] <= self.now_s:
                seq_id, (arrival_s, prompt, output) = waiting.pop(0)
                self.scheduler.add(
                    seq_id, range(prompt), SamplingParams(max_new_tokens=output, ignore_eos=True), arrival_s
                )
            planned = self.scheduler.plan(self.now_s)
            if isinstance(planned, StepBatch):
                self.steps.append(Step(self.now_s, planned))
                self.now_s += self.step_s
                self.commit(planned)
                continue
            next_s = waiting[0][1][0] if waiting else None
            if isinstance(planned, WaitUntil):
                next_s = planned.at_s if next_s is None else min(next_s, planned.at_s)
            if next_s is None:
                return self
            self.now_s = next_s
        raise AssertionError(f"still running after {self.max_steps} steps")


@pytest.fixture
def drive():
    """Makes a driver over a scheduler with these settings."""

    def make(*, step_s: float = 1.0, drafter=None, **settings) -> Drive:
        settings.setdefault("num_blocks", 1000)
        return Drive(Scheduler(SchedulerConfig(**settings), drafter=drafter), step_s=step_s)

    return make
