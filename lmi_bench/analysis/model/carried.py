"""A profile on devices and models that it was not fitted to: wider doubts of its constants.

Other kernels have other times of a layer, and most machines do not state a shared host bridge.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import Accelerator, find_accelerator, is_accelerator
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError

_PER_LAYER: Final = ("gap_per_layer_s", "host_per_layer_s")
_OTHER_KERNELS: Final = 0.5
"""Standard deviation of the logarithm of a layer's times. Fits of one engine differ by a factor of
1.3 in the gap of a layer between two tables on H100, and of 3 between MI300X and MI355X."""


def carried(profile: EngineProfile, setups: Iterable[Setup]) -> EngineProfile:
    """The profile with the doubts that these set-ups add to its parameters."""
    added: dict[str, float] = {}
    for setup in setups:
        device, link = setup.instance.accelerator, setup.instance.link
        if _other_generation(profile, device) or _first_mixture(profile, setup):
            added |= dict.fromkeys(_PER_LAYER, _OTHER_KERNELS)
        if setup.tensor_parallel > 1 and link.kind == "pcie" and link.is_shared is None:
            # a shared bridge carries tp times the bytes: half of that factor either way
            doubt = math.log(setup.tensor_parallel) / 2
            added["pcie_share"] = max(doubt, added.get("pcie_share", 0.0))
    if not added:
        return profile
    wider = {
        name: math.hypot(profile.log_sd[name], sd)
        for name, sd in added.items()
        if profile.log_sd.get(name)
    }
    return replace(profile, log_sd={**profile.log_sd, **wider})


def _other_generation(profile: EngineProfile, device: Accelerator) -> bool:
    """Whether the profile was fitted, but to no device of this generation."""
    known = generations(profile)
    return bool(known) and generation(device) not in known


def generations(profile: EngineProfile) -> frozenset[tuple[str, int, bool]]:
    """Of the devices that the profile was fitted to; empty for a prior or a processor."""
    names = filter(is_accelerator, profile.accelerators)
    return frozenset(generation(find_accelerator(name)) for name in names)


def generation(device: Accelerator) -> tuple[str, int, bool]:
    """Vendor, CUDA's major capability, and whether it has FP4 units (AMD states no capability)."""
    capability = int(device.compute_capability or 0)
    return device.vendor, capability, device.fp4_flop_per_s is not None


def _first_mixture(profile: EngineProfile, setup: Setup) -> bool:
    """Whether the model is a mixture, and the profile was fitted to none."""
    if not setup.shape.is_moe or not profile.models:
        return False
    try:
        return not any(find_model(name).is_moe for name in profile.models)
    except InputError:
        return False
