"""How many cores this process may keep busy."""

from __future__ import annotations

import os

import pytest

from lmi_bench.core.host import usable_cores


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "3200000 100000\n"}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({}, 16),
    ],
)
def test_a_containers_quota_of_time_limits_the_cores(tmp_path, sixteen_cores, files, cores):
    """Both versions' files, as the kernel's cgroup documentation has them."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores
