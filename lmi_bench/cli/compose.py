"""Puts the parts together: which target, engine, executor and clock a command runs on.

The only module that reaches `engine.torch_backend`, inside the function that needs it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmi_bench.analysis.knee_cause import KneeFacts
from lmi_bench.clock import run_virtual
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.errors import InputError
from lmi_bench.loadgen.in_process_target import InProcessTarget
from lmi_bench.loadgen.prompts import (
    CommonWords,
    DatasetPrompts,
    ExactText,
    Lengths,
    NoText,
    Prompts,
    PromptText,
    SyntheticPrompts,
    TokenIds,
    load_dataset,
)
from lmi_bench.loadgen.target import Target
from lmi_bench.model_shape import ModelShape
from lmi_bench.scenario import EngineSection, Scenario
from lmi_bench.units import bytes_to_gib

T = TypeVar("T")
Main = Callable[[Target], Awaitable[T]]
SIMULATED_PREFIX = "sim:"
ENGINE_TARGET = "engine"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to be entered: its executor holds the model already.

    facts  what a run's manifest says of it; notes: what a person is told at start
    """

    executor: Executor
    config: SchedulerConfig
    shape: ModelShape
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()

    def engine(self) -> AsyncEngine:
        """The engine; an async context manager."""
        return AsyncEngine(Scheduler(self.config), self.executor)


@dataclass(frozen=True, slots=True)
class Bench:
    """A target that is ready to be measured, and everything that depends on its kind.

    run         runs a coroutine over the target on the clock that the target needs
    knee_facts  what is known of the server, for the levels' lines given
    secrets     values that must never reach a file
    """

    title: str
    facts: dict[str, Any]
    prompts: Callable[[str], Prompts]
    run: Callable[[Main[Any]], Any]
    knee_facts: Callable[[Sequence[Mapping[str, Any]]], KneeFacts]
    notes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    spacing_s: float = 0.0
    salted: bool = field(default=True)

    def new_salt(self) -> str:
        """What makes this run's prompts unlike those of every other run."""
        return secrets.token_hex(4) if self.salted else ""


@contextmanager
def open_bench(scenario: Scenario) -> Iterator[Bench]:
    """The scenario's target, checked and loaded; raises InputError where it cannot be."""
    target = scenario.target
    if target == ENGINE_TARGET:
        yield _engine_bench(scenario)
    elif target.startswith(SIMULATED_PREFIX):
        yield _simulated_bench(scenario, target.removeprefix(SIMULATED_PREFIX))
    elif "://" in target:
        yield _http_bench(scenario)
    else:
        raise InputError(
            f"target {target!r} is not understood; write engine, sim:INSTANCE "
            "(such as sim:ml.g5.2xlarge) or a URL (http://host:port)"
        )
