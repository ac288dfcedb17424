"""Levels made of the keys that a test is about."""

from __future__ import annotations

from typing import Any

from lmi_bench.core.level import Level


def level_of(**keys: Any) -> Level:
    """The level of a line of levels.jsonl with these keys; a lone user where no load is given."""
    load = {} if {"concurrency", "rate_per_s"} & keys.keys() else {"concurrency": 1}
    return Level.from_json({"level": 0, "attempt": 1, **load, **keys})


def changed(level: Level, **keys: Any) -> Level:
    """The level with other values of these keys."""
    return Level.from_json({**level.to_json(), **keys})
