"""Before anything is imported: what a library reads only once."""

from __future__ import annotations

import gc
import os

# Triton looks at it when it is first imported, which transformers may do before the tests of
# its kernels are reached
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish(session: object) -> None:
    """Keep what all tests share out of later collections: each level of a sweep asks for one."""
    gc.collect()
    gc.freeze()
