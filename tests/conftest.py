"""Before anything is imported: what a library reads only once."""

from __future__ import annotations

import gc
import os

# Triton looks at it when it is first imported, which transformers may do before the tests of
# its kernels are reached
os.environ.setdefault("TRITON_INTERPRET", "1")
# the catalog's own prices, not those that `catalog refresh` wrote on this machine
os.environ["LMI_BENCH_DATA"] = os.devnull


def pytest_collection_finish(session: object) -> None:
    """Keep what all tests share out of later collections: each level of a sweep asks for one."""
    gc.collect()
    gc.freeze()
