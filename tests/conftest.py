"""Before anything is imported: what a library reads only once."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Triton looks at it when it is first imported, which transformers may do before the tests of
# its kernels are reached
os.environ.setdefault("TRITON_INTERPRET", "1")
# the catalog's own prices, not those that `catalog refresh` wrote on this machine
os.environ["LMI_BENCH_DATA"] = os.devnull
# a job in a shell's background ignores Ctrl-C, and so would every program that a test starts
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# no test takes a machine's speed for granted
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")


def pytest_collection_finish() -> None:
    """Keep what all tests share out of later collections: each level of a sweep asks for one."""
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So for what a module's tests have imported and cached."""
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
