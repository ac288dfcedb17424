"""What `profile collectives` and `profile attention` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """How all-reduces are timed."""

    ranks: int = option("Number of processes that add their arrays.", value=2)
    transport: tuple[str, ...] = option(
        "Transport: shared-memory, gloo, or nccl between GPUs; repeatable.",
        value=(),
        default="shared-memory and gloo",
    )
    rounds: int = option("Rounds of each size; the median counts.", value=5)
    out: Path | None = option("File for times and fit (JSON).", "--out", "-o")

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise InputError(f"--ranks {self.ranks}: an all-reduce needs at least 2")
        if self.rounds < 1:
            raise InputError(f"--rounds {self.rounds}: at least 1 is needed")


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Which attention is timed."""

    tokens: tuple[int, ...] = option(
        "Prompt length in tokens; repeatable.", value=(), default="256, 1,024 and 4,096"
    )
    heads: int = option("Number of query heads.", value=12)
    head_dim: int = option("Values of a head.", value=64)
    rounds: int = option("Rounds of each way; the median counts.", value=5)

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "rounds"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag} must be at least 1, got {getattr(self, name)}")
