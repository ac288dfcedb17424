"""Which GPUs the copies of a model stand on; on a CPU they share the one that there is."""

from __future__ import annotations

from lmi_bench.core.scenario import EngineSection


def gpu_count(settings: EngineSection) -> int | None:
    """GPUs of this machine where the settings ask for one; None where the engine is on a CPU."""
    if settings.device != "cuda" and settings.backend != "triton":
        return None
    import torch

    return torch.cuda.device_count()


def copies_a_device(copies: int, degree: int, gpus: int | None) -> int:
    """Most copies that share a device, and with it the memory.

    degree  devices of a copy; gpus: None on a CPU
    """
    return copies if gpus is None else -(-copies // _places(degree, gpus))


def first_device(copy: int, degree: int, gpus: int | None) -> int:
    """The first device of a copy, counted from 0: side by side, then from the start again."""
    return 0 if gpus is None else copy % _places(degree, gpus) * degree


def _places(degree: int, gpus: int) -> int:
    return max(1, gpus // degree)
