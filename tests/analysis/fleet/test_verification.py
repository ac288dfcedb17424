"""A plan is contradicted by its figures, not by the chance of arrivals and of 80 % intervals."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.verification import Verified, compare_figures, contradicts
from lmi_bench.analysis.level.layouts import RequestKind
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load

THROUGHPUT = "throughput_tokens_per_s"
KINDS = (RequestKind(100, 20, 0.7), RequestKind(100, 300, 0.3))
MEAN = 0.7 * 20 + 0.3 * 300


def _draw(rng: np.random.Generator, burstiness: float, kinds: tuple[RequestKind, ...]) -> Level:
    """A level of 300 requests at 2 req/s: renewal arrivals, outputs drawn from the kinds."""
    gaps = rng.gamma(burstiness, 0.5 / burstiness, 300)
    outputs = np.full(300, MEAN)
    if kinds:
        outputs = rng.choice([20.0, 300.0], 300, p=[0.7, 0.3])
    tokens_per_s = float(outputs.sum() / gaps.sum())
    level = Level(index=0, attempt=0, load=Load(rate_per_s=2.0), requests=300)
    return replace(level, throughput_tokens_per_s=tokens_per_s)


@pytest.mark.parametrize(("burstiness", "kinds"), [(1.0, ()), (1.0, KINDS), (0.25, KINDS)])
def test_four_of_five_draws_of_the_planned_load_are_inside(burstiness, kinds):
    rng = np.random.default_rng(3)
    figure = Estimate(2 * MEAN, 2 * MEAN, 2 * MEAN)
    candidate = SimpleNamespace(figures={THROUGHPUT: figure})
    question = SimpleNamespace(burstiness=burstiness, kinds=kinds, output_tokens=MEAN)
    verdicts = [
        next(compare_figures(candidate, question, _draw(rng, burstiness, kinds), share=1.0)).verdict
        for _ in range(2000)
    ]
    assert verdicts.count("inside") / len(verdicts) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(("outside", "of", "wanted"), [(0, 11, False), (2, 11, False), (6, 11, True)])
def test_one_or_two_misses_of_eleven_are_chance(outside, of, wanted):
    """Binomial with 0.2: two or more of eleven in 68 %, six or more in 1.2 %."""
    one = Estimate(1.0, 0.9, 1.1)
    rows = [Verified(str(k), one, 2.0 if k < outside else 1.0) for k in range(of)]
    assert contradicts([*rows, Verified("unknown", None, 1.0)]) is wanted
