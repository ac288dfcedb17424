"""Roofline: the batch at which a decode step turns from memory-bound to compute-bound.

Reads and arithmetic overlap perfectly at the data sheet's rates, so the times are lower bounds, not
forecasts (see `step_time`). All devices of a copy together. Source: Pope et al. 2022,
arXiv:2211.05102.
"""

FLOP_PER_PARAMETER = 2  # one multiplication and one addition


def ops_per_byte(flop_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """Operations that a device does in the time that a byte takes. A10G: 70e12 / 600e9 = 116.7."""
    return flop_per_s / bandwidth_bytes_per_s


def critical_batch_size(
    *,
    weight_bytes: float,
    params_active: float,
    bandwidth_bytes_per_s: float,
    flop_per_s: float,
    mean_context_tokens: float = 0.0,
    kv_bytes_per_token: float = 0.0,
) -> float | None:
    """Batch at which arithmetic takes as long as reading weights and cache; None if it never does.

    B*(L) = (W / BW) / (2 P / F - L k / BW): each sequence adds 2 P FLOP and L k bytes of cache
    """
    weights_s = weight_bytes / bandwidth_bytes_per_s
    compute_s = FLOP_PER_PARAMETER * params_active / flop_per_s
    cache_s = mean_context_tokens * kv_bytes_per_token / bandwidth_bytes_per_s
    if compute_s <= cache_s:
        return None
    return weights_s / (compute_s - cache_s)


def critical_batch_size_without_cache(
    *, bytes_per_weight: float, flop_per_s: float, bandwidth_bytes_per_s: float
) -> float:
    """The special case L = 0: (bytes per weight / 2) * F / BW.

    16 bits: 116.7 on A10G, 200.6 on A100 40 GB.
    """
    return bytes_per_weight / FLOP_PER_PARAMETER * ops_per_byte(flop_per_s, bandwidth_bytes_per_s)
