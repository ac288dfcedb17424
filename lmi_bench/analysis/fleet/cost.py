"""What tokens cost on machines that are paid by the hour.

    usd_per_1m = machines * price_per_hour * 1e6 / (3600 * tokens_per_s)

with output tokens, or input and output tokens, per second of the whole fleet. At the user's load
idle capacity is paid for; at saturation nothing is idle. A price of None stays None throughout.
"""

from __future__ import annotations

import math

from lmi_bench.core.units import HOURS_PER_MONTH, SECONDS_PER_HOUR

_MILLION = 1e6
_SAME_RATIO = 0.01  # how far input / output may be off the ratio that a blended price assumes


def usd_per_1m_tokens(fleet_usd_per_hour: float | None, tokens_per_s: float | None) -> float | None:
    """USD for a million tokens; None without a price or without tokens.

    >>> round(usd_per_1m_tokens(1.515, 486.0), 3)
    0.866
    """
    if fleet_usd_per_hour is None or not tokens_per_s:
        return None
    return fleet_usd_per_hour * _MILLION / (SECONDS_PER_HOUR * tokens_per_s)


def usd_per_month(fleet_usd_per_hour: float | None) -> float | None:
    """USD for a month of 730 hours; None without a price."""
    return None if fleet_usd_per_hour is None else fleet_usd_per_hour * HOURS_PER_MONTH


def blended_as_published(
    *,
    price_usd_per_hour: float | None,
    concurrency: float,
    itl_p50_s: float,
    input_tokens: int,
    output_tokens: int,
    slots: int,
    ratio: float = 3.0,
    discount: float = 0.0,
) -> tuple[float | None, str | None]:
    """The blended price of the optimization-toolkit post, or None and why it does not apply.

    blended = (1 - discount) * price / (throughput * 3600 / 1e6) / (ratio + 1)
    throughput = concurrency / p50 ITL

    It counts `ratio` input tokens for each output token and takes every slot to be decoding, so
    it is right only where input = ratio * output and concurrency <= slots.
    """
    if price_usd_per_hour is None:
        return None, "no price is known"
    if not math.isclose(input_tokens, ratio * output_tokens, rel_tol=_SAME_RATIO):
        return None, (
            f"it assumes {ratio:g} input tokens for each output token; "
            f"this workload has {input_tokens} to {output_tokens}"
        )
    if concurrency > slots:
        return None, f"it assumes that all {concurrency:g} requests decode; {slots} can"
    output_cost = usd_per_1m_tokens((1 - discount) * price_usd_per_hour, concurrency / itl_p50_s)
    assert output_cost is not None
    return output_cost / (ratio + 1), None
