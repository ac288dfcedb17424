"""Replicas in the simulator against engines behind the same router in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.router import LeastOutstanding, RandomChoice, RoundRobin
from lmi_bench.engine.scheduling.config import SchedulerConfig
from tests.parity.test_simulator import MIXED, StepTimes, assert_same_level, configs, lengths, open_loops


def by_chance():
    return RandomChoice(iter(random.Random(5).random, None))


ROUTERS = {"round robin": RoundRobin, "least": LeastOutstanding, "random": by_chance}


class Uneven(StepTimes):
    """Replicas that never step in lock-step: each step takes a little longer than its twin would.

    Two replicas that end a step at one instant may be told of it in either order.
    """

    def step_time_s(self, shape):
        odd = shape.prefill_tokens % 7 + shape.decode_context_tokens % 11
        return super().step_time_s(shape) + 1.37e-5 * odd


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("load", [Load(concurrency=7), Load(rate_per_s=9.0)], ids=str)
def test_each_router_sends_the_same_requests_to_the_same_replicas(router, load):
    config = SchedulerConfig(num_blocks=60, block_size=4, max_rolling_batch_size=3)
    spec = LevelSpec(0, load, num_requests=30)
    run = assert_same_level(spec, [(20, 31), (31, 20), (7, 3)], config, Uneven(), replicas=3, router=router)
    assert {record.exchange.replica for record in run.records} == {0, 1, 2}


@settings(max_examples=15)
@given(open_loops, lengths, configs, st.integers(2, 4), st.sampled_from(list(ROUTERS)))
def test_open_loops_over_replicas_give_the_same_records(spec, lengths, config, replicas, router):
    """Without a warm-up, which the simulator leaves out: its requests move the router on."""
    spec = replace(spec, warmup_requests=0)
    assert_same_level(spec, lengths, config, Uneven(), replicas=replicas, router=ROUTERS[router])


def test_round_robin_gives_every_replica_its_share():
    spec = LevelSpec(index=0, load=Load(concurrency=4), num_requests=24)
    run = assert_same_level(spec, MIXED, SchedulerConfig(num_blocks=1000), Uneven(), replicas=4)
    assert [record.exchange.replica for record in run.records] == [n % 4 for n in range(24)]


def test_overload_of_one_replica_is_refused_in_both():
    """Round robin sends on whether or not the replica has room."""
    spec = LevelSpec(index=0, load=Load(concurrency=6), num_requests=40)
    config = SchedulerConfig(num_blocks=100, max_concurrent_requests=2)
    run = assert_same_level(spec, [(4, 3), (4, 30)], config, Uneven(), replicas=2)
    refused = [record for record in run.records if record.status == "overloaded"]
    assert refused
    assert all(record.exchange.replica is None for record in refused)
