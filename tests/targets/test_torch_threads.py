"""torch's threads wait briefly, unless the user has said how they are to wait."""

from __future__ import annotations

import os
import sys

import pytest

from lmi_bench.targets.bundled import SPIN_COUNT, wait_briefly


@pytest.mark.parametrize(
    ("given", "spins"), [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_spinning_is_bounded_where_the_user_said_nothing(monkeypatch, given, spins):
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    wait_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_nothing_is_set_once_torch_is_loaded(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "torch", sys)
    wait_briefly()
    assert os.environ == {}
