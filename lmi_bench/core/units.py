"""Unit conversions and the formatting of figures.

Inside the program: seconds, bytes, tokens per second. Shown: ms, GiB, tok/s. Only the console and
the report convert units too.
"""

GIB = 2**30
MIB = 2**20
MS_PER_S = 1e3
SECONDS_PER_HOUR = 3600.0
HOURS_PER_MONTH = 730.0  # 365 * 24 / 12, the month of the cloud price lists

_FOUR_DIGITS = 9_999.5  # rounds to five digits from here on


def s_to_ms(seconds: float) -> float:
    """Seconds to milliseconds."""
    return seconds * MS_PER_S


def ms_to_s(milliseconds: float) -> float:
    """Milliseconds to seconds."""
    return milliseconds / MS_PER_S


def bytes_to_gib(num_bytes: float) -> float:
    """Bytes to GiB (2**30 bytes)."""
    return num_bytes / GIB


def plural(number: int, noun: str) -> str:
    """A counted noun.

    >>> plural(1, "line"), plural(1200, "line")
    ('1 line', '1,200 lines')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_figure(value: float | None, places: int | None = None) -> str:
    """A figure with four significant digits and no exponent; empty for None.

    places  decimal places instead of four digits

    >>> format_figure(0.12345), format_figure(1234.5), format_figure(9999.7)
    ('0.1235', '1,234', '10,000')
    """
    if value is None:
        return ""
    if places is None and abs(value) < _FOUR_DIGITS:
        return f"{value:,.4g}"
    return f"{value:,.{places or 0}f}"


def format_interval(value: float, low: float, high: float) -> str:
    """A figure with its interval, in three digits.

    >>> format_interval(1247.361, 841.0, 1655.2)
    '1,250 [841-1,660]'
    """
    return "{} [{}-{}]".format(*(format_figure(float(f"{x:.3g}")) for x in (value, low, high)))
