"""What `profile collectives` and `profile attention` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """How all-reduces are timed."""

    ranks: Annotated[int, Option("Number of processes that add their arrays.")] = 2
    transport: Annotated[
        tuple[str, ...],
        Option(
            "Transport: shared-memory, gloo, or nccl between GPUs; repeatable.",
            default="shared-memory and gloo",
        ),
    ] = ()
    rounds: Annotated[int, Option("Rounds of each size; the median counts.")] = 5
    out: Annotated[Path | None, Option("File for times and fit (JSON).", ("--out", "-o"))] = None

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise InputError(f"--ranks {self.ranks}: an all-reduce needs at least 2")
        if self.rounds < 1:
            raise InputError(f"--rounds {self.rounds}: at least 1 is needed")


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Which attention is timed."""

    tokens: Annotated[
        tuple[int, ...],
        Option("Prompt length in tokens; repeatable.", default="256, 1,024 and 4,096"),
    ] = ()
    heads: Annotated[int, Option("Number of query heads.")] = 12
    head_dim: Annotated[int, Option("Values of a head.")] = 64
    rounds: Annotated[int, Option("Rounds of each way; the median counts.")] = 5

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "rounds"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag} must be at least 1, got {getattr(self, name)}")
