"""Service-level objectives such as `ttft_p90<=1s`.

Goodput limits of requests are written as vLLM does: `ttft:500 tpot:15`.
Grammar: (ttft|itl|tpot|e2e|latency_per_token)_(mean|p50|p90|p95|p99)<=NUMBER(ms|s)
with `<` read as `<=`.
"""

import re
from dataclasses import dataclass

from lmi_bench.core.errors import InputError
from lmi_bench.core.units import MS_PER_S

METRICS = ("ttft", "itl", "tpot", "e2e", "latency_per_token")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")

_PATTERN = re.compile(rf"({'|'.join(METRICS)})_({'|'.join(STATISTICS)})\s*<=?\s*([0-9]*\.?[0-9]+)\s*(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """One limit on one statistic of one latency metric, in milliseconds."""

    metric: str
    statistic: str
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric}_{self.statistic}<={self.limit_ms:g}ms"

    @property
    def of_a_request(self) -> str:
        """The limit for a single request, without a statistic."""
        return f"{self.metric}<={self.limit_ms:g}ms"


def parse_slo(text: str) -> Slo:
    """Read one SLO; raises InputError with the grammar if it is not one.

    >>> parse_slo("ttft_p90<=1s") == parse_slo("ttft_p90 < 1000ms")
    True
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None and _PATTERN.fullmatch(f"{text.strip()}s"):
        number = re.split("<=?", text)[1].strip()
        raise InputError(f"SLO {text!r}: {number} of what? Write {text}s or {text}ms")
    if match is None:
        raise InputError(
            f"SLO {text!r} is not understood; write METRIC_STATISTIC<=NUMBER(ms|s) with a metric "
            f"of {', '.join(METRICS)} and a statistic of {', '.join(STATISTICS)}, "
            "for example ttft_p90<=1s"
        )
    metric, statistic, number, unit = match.groups()
    limit_ms = float(number) * (MS_PER_S if unit == "s" else 1.0)
    if limit_ms <= 0:
        raise InputError(f"SLO {text!r}: the limit must be above 0")
    return Slo(metric, statistic, limit_ms)


GOOD_SHARE = 0.9
"""Share of a level's requests that must be good for the level to pass `--goodput`: an
SLO's p90 requires this of one metric, goodput of all limits at once."""

_GOODPUT = re.compile(r"(ttft|tpot|itl|e2el|e2e):([0-9]*\.?[0-9]+)")


def parse_goodput(text: str) -> list[Slo]:
    """Limits of a good request, in ms, separated by spaces or commas.

    The statistic is the mean; for a single request it is the value itself.

    >>> [str(limit) for limit in parse_goodput("ttft:500 e2el:2000")]
    ['ttft_mean<=500ms', 'e2e_mean<=2000ms']

    Raises InputError with the grammar for any other text.
    """
    limits = []
    for part in re.split(r"[\s,]+", text.strip()):
        match = _GOODPUT.fullmatch(part)
        if match is None or float(match[2]) <= 0:
            raise InputError(
                f"goodput {part!r} is not understood; write METRIC:MS with a metric of ttft, tpot, "
                "itl, e2el, for example ttft:500 tpot:15"
            )
        limits.append(Slo("e2e" if match[1] == "e2el" else match[1], "mean", float(match[2])))
    return limits


def join_goodput(arguments: list[str]) -> list[str]:
    """The command line with `--goodput ttft:500 tpot:15`, as in vLLM, joined into one value.

    >>> join_goodput(["sweep", "--goodput", "ttft:500", "tpot:15", "--rate", "2"])
    ['sweep', '--goodput', 'ttft:500 tpot:15', '--rate', '2']
    """
    joined: list[str] = []
    after = False
    for argument in arguments:
        if after and _GOODPUT.fullmatch(argument) and joined[-1] != "--goodput":
            joined[-1] += f" {argument}"
            continue
        after = argument == "--goodput" or (after and joined[-1] == "--goodput")
        joined.append(argument)
    return joined
