"""Made-up servers whose answers, and so whose knees, are known by construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.slo_results import DECIDED, CertainMiss, judge_level
from lmi_bench.analysis.search.slo_search import SloSearch
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Level
from lmi_bench.core.records import LevelRun, RequestRecord, with_start_marked
from lmi_bench.core.workload import LevelSpec

Latency = Callable[[float], float]
"""Seconds of an answer at a load."""


class MadeUpServer:
    """Answers of two tokens after `latency(load)` seconds, lognormally noisy.

    Users send again at once, in lockstep of whole rounds; requests above `error_above` fail.
    """

    def __init__(self, latency: Latency, *, noise=0.0, seed=0, error_above=np.inf):
        self.latency = latency
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self.error_above = error_above

    def level(self, spec: LevelSpec, slos: Any = ()) -> LevelRun:
        load = spec.concurrency or spec.rate_per_s
        watch = CertainMiss(slos, spec)
        free = [0.0] * (spec.concurrency or 1)
        records, stopped_by, failed = [], None, 0
        for number in range(spec.num_requests):
            user = number % len(free)
            sent = number / spec.rate_per_s if spec.rate_per_s else free[user]
            took = self.latency(load) * float(np.exp(self.noise * self.rng.standard_normal()))
            if load > self.error_above:
                record = RequestRecord(number, sent, Exchange(sent, ended_s=sent + 0.01), status="overloaded")
                failed += 1
            else:
                record = RequestRecord(number, sent, Exchange(sent, (sent + took / 2, sent + took)))
            free[user] = sent + took
            records.append(record)
            if slos and watch.add(record) and stopped_by is None:
                stopped_by = DECIDED
            if stopped_by and user == len(free) - 1:
                break
        if failed > 0.5 * len(records):
            stopped_by = "errors"
        return LevelRun(spec, 1, with_start_marked(records, spec), stopped_by)


class Queue:
    """Slots that take a request each for `service_s`, first come first served."""

    def __init__(self, slots: int, service_s: float):
        self.slots, self.service_s = slots, service_s

    def level(self, spec: LevelSpec, slos: Any = ()) -> LevelRun:
        watch = CertainMiss(slos, spec)
        free, records = [0.0] * self.slots, []
        for number in range(spec.num_requests):
            due = number / spec.rate_per_s
            slot = free.index(min(free))
            free[slot] = max(due, free[slot]) + self.service_s
            times = (free[slot] - self.service_s / 2, free[slot])
            records.append(RequestRecord(number, due, Exchange(due, times)))
            if slos and watch.add(records[-1]):
                return LevelRun(spec, 1, tuple(records), DECIDED)
        return LevelRun(spec, 1, tuple(records))


def run_search(search: SloSearch, server: MadeUpServer, *, cut: bool = True):
    """The lines and records of a whole search."""
    lines: list[Level] = []
    records: list[tuple] = []
    while (spec := search.next_level(lines)) is not None:
        run = server.level(spec, search.slos if cut else ())
        judged = judge_level(run, search.slos)
        lines.append(replace(summarise_level(run), search=judged))
        records.append(run.records)
        assert len(lines) < 60
    return lines, records
