"""How torch's threads wait for each other, which has to be said before torch is loaded."""

from __future__ import annotations

import os
import sys
from typing import Final

SPIN_COUNT: Final = "3000"
"""Turns of libgomp's waiting loop, some 0.1 to 0.2 ms on x86. Its own 300,000 are 10 to 20 ms:
threads then burn the slice of the one that they wait for, where it has lost its core to another
process. Two threads, one core burnt: demo-15m, 32 sequences, 88 ms a step with those, 44 with
these."""


def wait_briefly() -> None:
    """Bound how long torch's threads spin, unless the user has said how they are to wait."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
