"""Where copies of a model stand: each on GPUs of its own as long as there are any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_bench.core.listener import SILENT
from lmi_bench.core.scenario import EngineSection
from lmi_bench.targets import bundled
from lmi_bench.targets.back_ends import BackEnd, step_settings
from lmi_bench.targets.loading import LoadPlan, gpu_count


@pytest.mark.parametrize(
    ("copies", "degree", "gpus", "devices", "shared_by"),
    [
        (2, 4, 8, [0, 4], 1),
        (4, 2, 8, [0, 2, 4, 6], 1),
        (3, 1, 2, [0, 1, 0], 2),
        (2, 1, 1, [0, 0], 2),
        (2, 2, 3, [0, 0], 2),
        (2, 2, None, [0, 0], 2),
    ],
)
def test_copies_stand_side_by_side_and_share_only_what_is_too_little(copies, degree, gpus, devices, shared_by):
    """None: the one CPU, which all share."""
    plan = LoadPlan(EngineSection(replicas=copies), "demo", Path(), None, degree, 8, gpus, 64, BackEnd())
    assert [plan.first_device(copy) for copy in range(copies)] == devices
    assert plan.sharing == shared_by


def test_an_engine_on_the_cpu_counts_no_gpus():
    assert gpu_count(EngineSection(device="cpu")) is None
    assert isinstance(gpu_count(EngineSection(device="cuda")), int)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 32),
        ({"max_rolling_batch_size": 100}, 100),
        ({"policy": "none"}, 1),
        ({"policy": "dynamic", "batch_size": 48}, 48),
    ],
)
def test_no_graph_is_captured_for_more_sequences_than_ever_run(settings, most):
    """32 is the rolling batch's default."""
    steps = step_settings(EngineSection(**settings), BackEnd(triton=True, device="cuda"))
    assert steps.most_sequences == most


@pytest.mark.parametrize(
    ("settings", "gpus", "draft", "share", "is_bounded"),
    [
        ({}, None, False, 0.5, True),
        ({}, 1, False, 0.9, False),
        ({"memory_share": 0.3}, 1, False, 0.3, False),
        ({"max_batch_total_tokens": 1 << 18}, 1, False, 0.9, True),
        ({"replicas": 2}, 2, False, 0.9, False),
        ({"replicas": 2}, 1, False, 0.25, False),
        ({}, 1, True, 0.25, False),
    ],
)
def test_a_gpu_that_a_model_has_to_itself_is_its_caches(settings, gpus, draft, share, is_bounded):
    """What a second copy or a draft weighs is not known when the first cache is allocated."""
    plan = bundled._plan("demo-15m", EngineSection(**settings), SILENT)
    back_end = BackEnd(device="cpu" if gpus is None else "cuda")
    folder: Path | None = plan.folder if draft else None
    loaded = bundled._load_settings(replace(plan, gpus=gpus, back_end=back_end, draft_folder=folder), None)
    assert loaded.memory_share == share
    assert (loaded.most_cache_tokens == 1 << 18) is is_bounded
