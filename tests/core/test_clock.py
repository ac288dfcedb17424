from __future__ import annotations

import asyncio
import time

import pytest

from lmi_bench.core.clock import is_virtual, loop_time_s, run_virtual, settle
from lmi_bench.core.errors import InputError, LmiBenchError


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_an_hour_of_sleep_takes_no_time():
    async def main():
        await asyncio.sleep(3600)
        return now_s()

    start_s = time.monotonic()
    assert run_virtual(main()) == 3600
    assert time.monotonic() - start_s < 1


def test_sleepers_wake_in_the_order_of_their_times():
    async def main():
        woken = []

        async def sleeper(delay_s):
            await asyncio.sleep(delay_s)
            woken.append((delay_s, now_s()))

        async with asyncio.TaskGroup() as group:
            for delay_s in (3.0, 1.0, 2.5):
                group.create_task(sleeper(delay_s))
        return woken

    assert run_virtual(main()) == [(1.0, 1.0), (2.5, 2.5), (3.0, 3.0)]


def test_small_steps_far_from_zero_add_up():
    """1,000 steps of a millisecond after 11 days: none is lost to the clock's resolution."""

    async def main():
        await asyncio.sleep(1e6)
        for _ in range(1000):
            await asyncio.sleep(1e-3)
        return now_s()

    assert run_virtual(main()) == pytest.approx(1e6 + 1, abs=1e-6)


def test_a_timer_does_not_run_before_its_time():
    async def main():
        await asyncio.sleep(1e6)
        early = []
        asyncio.get_running_loop().call_later(1e-6, early.append, 1)
        for _ in range(5):
            await asyncio.sleep(0)
        return early

    assert run_virtual(main()) == []


def test_settling_lets_everything_at_this_instant_happen_first():
    async def main():
        happened = []

        async def chain(links):
            await asyncio.sleep(1)
            for _ in range(links):
                await asyncio.sleep(0)
            happened.append(links)

        async with asyncio.TaskGroup() as group:
            for links in (0, 3, 30):
                group.create_task(chain(links))
            group.create_task(asyncio.sleep(2))
            await asyncio.sleep(1)
            await settle()
            return happened, now_s()

    assert run_virtual(main()) == ([0, 3, 30], 1.0)


def test_in_real_time_settling_only_yields():
    async def main():
        assert not is_virtual()
        await asyncio.wait_for(settle(), 60)

    asyncio.run(main())


def test_a_wait_that_nothing_ends_is_an_error_and_not_a_hang():
    async def main():
        assert is_virtual()
        await asyncio.Event().wait()

    with pytest.raises(LmiBenchError, match="no timer ends"):
        run_virtual(main())


def test_virtual_time_ends_after_thirty_years():
    with pytest.raises(InputError, match="30 years"):
        run_virtual(asyncio.sleep(1.1e9))


def test_tasks_left_behind_are_cancelled():
    cancelled = []

    async def left():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(now_s())
            raise

    async def main():
        task = asyncio.create_task(left())
        await asyncio.sleep(1)
        return task

    assert run_virtual(main()).cancelled()
    assert cancelled == [1.0]


def test_an_error_comes_out_as_it_is():
    async def main():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())


def test_the_loops_time_is_virtual_where_the_loop_is():
    async def wait():
        start_s = loop_time_s()
        await asyncio.sleep(100)
        return loop_time_s() - start_s

    assert run_virtual(wait()) == pytest.approx(100)
