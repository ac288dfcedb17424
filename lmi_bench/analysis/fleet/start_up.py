"""Time from growing load until a new machine serves: by its parts, stated or estimated.

The estimate rests on figures that AWS, Anyscale and vLLM's developers published:

    machine and container  134 s without weights (ml.g4dn.xlarge, image cached on the host)
    image                  333 s for 17.7 GB on ml.g6.2xlarge, 0 s where the host has cached it
    weights                16.4 GB in 77 s over the 5 Gbit/s of ml.g6.2xlarge; 140 GB in 265 s on
                           ml.p4de.24xlarge, which bounds the rate of wider networks
    compilation            39 s for the 32 layers of Llama 3 8B, 145 s for Llama 70B at TP 8, and
                           60 s more there until the devices have checked each other

so each part may be off by the factor `DOUBT`.
"""

import math
from dataclasses import dataclass, fields
from typing import Final

from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError

DOUBT: Final = 2.0
"""The true time may be this many times longer or shorter than the estimate."""
_DETECTION_S, _MACHINE_S, _WARM_UP_S = 60.0, 134.0, 10.0
_NETWORK_SHARE: Final = 0.34
_MOST_DOWNLOAD_BYTES_PER_S: Final = 0.5e9
_READ_BYTES_PER_S: Final = 1e9  # of one worker, from the host's page cache
_READ_BYTES_PER_S_IN_ALL: Final = 5e9
_HOST_SHARE: Final = 0.9
_ENGINE_S, _LAYER_S, _PEERS_S = 10.0, 1.5, 60.0


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds between the growth of a load and a new machine that serves, to be measured.

    detection_s  before the launch, so not billed
    """

    detection_s: float
    provisioning_s: float
    image_s: float
    weights_s: float
    compile_s: float
    warm_up_s: float

    def __post_init__(self) -> None:
        for item in fields(self):
            if not 0 <= getattr(self, item.name) < math.inf:
                raise InputError(f"start-up part {item.name} must be 0 s or more")

    @property
    def total_s(self) -> float:
        """start_s: all parts, one after the other."""
        return float(sum(getattr(self, item.name) for item in fields(self)))


_PARTS = tuple(item.name.removesuffix("_s") for item in fields(StartUp))


def parse_start_up(text: str) -> StartUp:
    """`460` seconds in total, all of them billed, or all parts by name.

    >>> parse_start_up("460").total_s
    460.0
    >>> parts = "detection=60,provisioning=180,image=120,weights=60,compile=30,warm_up=10"
    >>> parse_start_up(parts).detection_s
    60.0

    Raises InputError with the missing or unknown parts.
    """
    nothing = dict.fromkeys(_PARTS, 0.0)
    try:
        if "=" not in text:
            given = nothing | {"provisioning": float(text)}
        else:
            pairs = [item.partition("=") for item in text.replace("warm-up", "warm_up").split(",")]
            given = {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        given = {}
    missing = [name for name in _PARTS if name not in given]
    unknown = [name for name in given if name not in _PARTS]
    if missing or unknown:
        raise InputError(
            f"start-up {text!r}: give the seconds as a whole (460), or each of "
            f"{', '.join(f'{name}=S' for name in _PARTS)}"
            + (f"; missing: {', '.join(missing)}" if missing and given else "")
            + (f"; unknown: {', '.join(unknown)}" if unknown else "")
        )
    return StartUp(**{f"{name}_s": seconds for name, seconds in given.items()})


def loads_in_parallel(instance: Instance, *, weight_bytes: float, workers: int) -> bool:
    """True if the host's memory holds all copies of one container at once."""
    return workers > 1 and workers * weight_bytes <= _HOST_SHARE * instance.host_memory_bytes


def estimated_start_up(
    instance: Instance,
    *,
    weight_bytes: float,
    num_layers: int,
    tensor_parallel: int,
    workers: int = 1,
    downloads: int = 1,
    compiles: bool = True,
) -> StartUp:
    """The start-up of a machine whose host has cached the image, in seconds.

    weight_bytes  of one copy; downloads: times that they are fetched over the machine's network
    workers       copies that one container loads, one after the other unless they load in parallel
    compiles      False for an eager engine, which compiles no steps and captures no graphs
    """
    rate = _MOST_DOWNLOAD_BYTES_PER_S
    if instance.network_bits_per_s is not None:
        rate = min(rate, _NETWORK_SHARE * instance.network_bits_per_s / 8)
    read_s = weight_bytes / _READ_BYTES_PER_S
    steps_s = _ENGINE_S + (_LAYER_S * num_layers if compiles else 0.0)
    steps_s += _PEERS_S if tensor_parallel > 1 else 0.0
    in_turn = workers
    if loads_in_parallel(instance, weight_bytes=weight_bytes, workers=workers):
        read_s = max(read_s, workers * weight_bytes / _READ_BYTES_PER_S_IN_ALL)
        in_turn = 1
    return StartUp(
        detection_s=_DETECTION_S,
        provisioning_s=_MACHINE_S,
        image_s=0.0,
        weights_s=downloads * weight_bytes / rate + in_turn * read_s,
        compile_s=in_turn * steps_s,
        warm_up_s=_WARM_UP_S,
    )
