"""What a variant's sweep does when something disturbs the load generator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmi_bench.core.listener import SILENT
from lmi_bench.jobs.optimize import run as optimize
from tests.levels import level_of


@pytest.mark.parametrize(("valid", "sweeps"), [([True], 1), ([False, True], 2), ([False] * 5, 3)])
def test_an_invalid_level_is_measured_again_at_most_twice(monkeypatch, tmp_path, valid, sweeps):
    folders = []

    def sweep_scenario(scenario, *, listener, out):
        level = level_of(concurrency=2, valid=valid[len(folders)], invalid_reason="late sends")
        folders.append(out.name)
        return SimpleNamespace(run=SimpleNamespace(levels=[level], path=out))

    monkeypatch.setattr(optimize, "sweep_scenario", sweep_scenario)
    run = optimize._sweep(None, tmp_path, "int8", SILENT)
    assert folders == ["int8", "int8-2", "int8-3"][:sweeps]
    assert run.path.name == folders[-1]
