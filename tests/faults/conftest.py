"""Every fault is told apart by both receivers: Python's, and the native one where it can be had."""

from __future__ import annotations

import pytest

from lmi_bench.loadgen.http.native_harvest import choose_receive
from tests.faults import misbehaving

CHOICE = choose_receive("auto")


@pytest.fixture(
    params=[
        "python",
        pytest.param("native", marks=pytest.mark.skipif(CHOICE.library is None, reason=f"receiver: {CHOICE.note}")),
    ]
)
def receiver(request):
    """Who reads for `record_of` and its kin, and for targets made with `misbehaving.options()`."""
    misbehaving.NATIVE = CHOICE.library if request.param == "native" else None
    yield request.param
    misbehaving.NATIVE = None
