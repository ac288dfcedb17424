"""The only place, beside the console and the report, where a unit is changed.

Inside the program: seconds, bytes, tokens per second. Shown: ms, GiB, tok/s.
"""

from __future__ import annotations

GIB = 2**30
MIB = 2**20
MS_PER_S = 1e3
SECONDS_PER_HOUR = 3600.0
HOURS_PER_MONTH = 730.0  # 365 * 24 / 12, the month of the cloud price lists


def s_to_ms(seconds: float) -> float:
    """Seconds to milliseconds."""
    return seconds * MS_PER_S


def ms_to_s(milliseconds: float) -> float:
    """Milliseconds to seconds."""
    return milliseconds / MS_PER_S


def bytes_to_gib(num_bytes: float) -> float:
    """Bytes to GiB (2**30 bytes)."""
    return num_bytes / GIB


def format_count(value: int) -> str:
    """A count as people read it: 12,345."""
    return f"{value:,}"
