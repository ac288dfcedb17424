"""Where a noisy curve reaches the limit: against lines, steps and least squares."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.results.slo_results import UNKNOWN_NOISE, judge_level, log_noise
from lmi_bench.analysis.search.slo_curve import DRAWS, SloCurve, Trial, bracket, by_load, trial
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Judgement, Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.workload import LevelSpec
from tests.levels import level_of

LOADS = np.array([4.0, 8.0, 16.0, 32.0, 64.0, 80.0, 100.0])


def line(knee, slope=0.7, loads=LOADS):
    """Log ratios of a power law that reaches the limit at the knee."""
    return slope * np.log(loads / knee)


def crossings(log_ratio, noise, loads=LOADS, **options):
    judged, noise = Judgement(True, 1.0, "e2e_p90<=2000ms", 100), np.broadcast_to(noise, loads.shape)
    each = zip(loads.tolist(), log_ratio.tolist(), noise.tolist(), strict=True)
    trials = [Trial(load, judged, above, sd, requests=100, full=True) for load, above, sd in each]
    return SloCurve(trials).crossings(**options)


def test_levels_without_noise_give_the_place_of_a_power_law():
    found = np.exp(crossings(line(50.0), 0.0))
    assert np.quantile(found, [0.025, 0.975]) == pytest.approx([50.0, 50.0], rel=0.06)
    assert np.median(found) == pytest.approx(50.0, rel=0.01)


def test_a_straight_curve_is_found_as_surely_as_least_squares_would():
    """The crossing of a fitted line a + b x has the standard error of its height there over b."""
    noise, x = 0.05, np.log(LOADS)
    found = np.concatenate(
        [
            crossings(line(70.0) + np.random.default_rng(seed).normal(0, noise, 7), noise, reach=1.0)
            for seed in range(20)
        ]
    )
    at = np.array([1.0, math.log(70.0)])
    design = np.stack([np.ones(7), x], axis=1)
    height = noise * math.sqrt(at @ np.linalg.inv(design.T @ design) @ at)
    least_squares = height / 0.7 * math.sqrt(2)  # of drawn curves about an estimate that errs too
    spread = np.std(found[np.isfinite(found)])
    assert least_squares < spread < 2.5 * least_squares  # a curve may bend, a line may not
    assert np.median(found) == pytest.approx(math.log(70.0), abs=0.05)


def test_a_step_may_lie_anywhere_between_the_levels_around_it():
    loads = np.array([4.0, 16.0, 64.0, 88.0, 92.0, 96.0, 200.0])
    below = np.full(5, -0.5)
    found = np.exp(crossings(np.concatenate([below, [1.3, 1.4]]), 0.02, loads))
    assert np.quantile(found, 0.025) >= 92.0 - 0.1
    assert np.quantile(found, 0.975) <= 96.0 + 0.1
    assert np.median(found) == pytest.approx(94.0, abs=1.0)


def test_noisier_levels_leave_more_open():
    widths = []
    for noise in (0.01, 0.03, 0.1):
        low, high = np.quantile(crossings(line(70.0), noise, reach=1.0), [0.1, 0.9])
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[2] > 3 * widths[0]


def test_a_few_requests_above_the_limit_at_a_low_load_do_not_pull_the_boundary_there():
    """Latency does not fall with load: what lies above at 4 users and below at 64 is noise."""
    log_ratio = line(70.0)
    noise = np.full(LOADS.size, 0.03)
    log_ratio[0], noise[0] = 0.1, 0.5
    found = np.exp(crossings(log_ratio, noise, reach=1.0))
    assert np.quantile(found, 0.025) > 60.0


def test_a_curve_that_stays_below_crosses_nowhere_and_one_above_before_all():
    assert np.all(crossings(line(1e6), 0.01) == math.inf)
    assert np.all(crossings(line(0.001), 0.01) == -math.inf)


def test_draws_rise_and_repeat_themselves():
    first, again = (crossings(line(50.0), 0.05) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.all(np.diff(first[np.isfinite(first)]) >= 0)
    assert DRAWS / 10 <= first.size <= DRAWS


def test_draws_do_not_depend_on_the_signs_that_a_processor_gives_eigenvectors(monkeypatch):
    eigh = np.linalg.eigh
    first = crossings(line(50.0), 0.05)

    def flipped(matrix):
        values, vectors = eigh(matrix)
        return values, vectors * np.where(np.arange(len(values)) % 2, -1.0, 1.0)

    monkeypatch.setattr(np.linalg, "eigh", flipped)
    np.testing.assert_allclose(crossings(line(50.0), 0.05), first, rtol=1e-10)


def test_one_level_alone_says_little():
    """Half the slope's prior: 4 users at a third of the limit reach it at 4 * 3 ** (1 / 0.5)."""
    found = crossings(np.array([-math.log(3.0)]), 0.02, np.array([4.0]), reach=5.0)
    assert np.median(found) == pytest.approx(math.log(36.0), abs=0.7)
    low, high = found[len(found) // 10], found[9 * len(found) // 10]
    assert high - low > 1.0


def tried(load, ratio, *, requests=100, noise=0.03, full=True):
    judgement = Judgement(ratio <= 1, ratio, "e2e_p90<=2000ms", requests, noise=noise)
    return Trial(load, judgement, math.log(ratio), noise, requests, full)


def loads(found):
    return tuple(None if end is None else end.load for end in (found.low, found.high))


def test_the_bracket_lies_between_the_last_pass_and_the_first_miss():
    assert loads(bracket([tried(4, 0.5), tried(8, 0.9), tried(12, 1.1), tried(16, 1.3)])) == (8, 12)
    assert loads(bracket([tried(4, 0.5), tried(8, 0.9)])) == (8, None)
    assert loads(bracket([tried(4, 1.5)])) == (None, 4)
    assert loads(bracket([])) == (None, None)


def test_a_small_miss_below_a_surer_pass_is_no_breach():
    """84 users miss by 1 % with much noise, 88 pass by 4 % with little: together they pass."""
    found = bracket([tried(64, 0.8), tried(84, 1.01, noise=0.06), tried(88, 0.96), tried(92, 1.1)])
    assert loads(found) == (88, 92)
    other = bracket([tried(64, 0.8), tried(84, 1.05), tried(88, 0.99, noise=0.06), tried(92, 1.1)])
    assert loads(other) == (64, 84)


def test_a_whole_level_outranks_a_look_whichever_came_first():
    look, whole = tried(8, 1.2, requests=16, full=False), tried(8, 0.9, requests=29)
    assert [one.judgement.ratio for one in by_load([look, whole])] == [0.9]
    assert [one.judgement.ratio for one in by_load([whole, look])] == [0.9]


def test_a_few_requests_that_agree_by_chance_are_held_as_noisy_as_the_rest():
    """noise * sqrt(requests) is 0.3 for the others; 8 requests then have 0.3 / sqrt(8)."""
    lucky, others = tried(4, 0.5, requests=8, noise=0.001), [tried(8, 0.6), tried(16, 0.7)]
    found = by_load([lucky, *others])
    assert found[0].noise == pytest.approx(0.3 / math.sqrt(8))
    assert [one.noise for one in found[1:]] == [0.03, 0.03]


@pytest.mark.parametrize(("statistic", "q"), [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)])
def test_the_noise_of_a_quantile_is_that_of_repeated_samples(statistic, q):
    """Against 2,000 fresh samples of 400 lognormal times; one sample alone tells it within half."""
    rng = np.random.default_rng(1)
    fresh = np.exp(0.3 * rng.standard_normal((2000, 400)))
    truth = np.std(np.log(np.quantile(fresh, q, axis=1)))
    told = [log_noise(values, statistic, samples=400) for values in fresh[:200]]
    assert np.mean(told) == pytest.approx(truth, rel=0.15)


def test_the_noise_of_a_mean_is_its_standard_error():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert log_noise(values, "mean", samples=4) == pytest.approx(math.sqrt(5 / 3) / 2 / 2.5)


def test_noise_is_not_told_by_one_request_or_beside_an_endless_one():
    assert log_noise(np.array([3.0]), "p90", samples=1) == UNKNOWN_NOISE
    assert log_noise(np.array([1.0, 1.1, np.inf]), "p90", samples=3) == UNKNOWN_NOISE
    assert log_noise(np.array([1.0, np.inf]), "mean", samples=2) == UNKNOWN_NOISE


def test_gaps_between_tokens_count_as_many_samples_as_requests():
    """Ten requests of a hundred gaps each are less than a thousand independent gaps."""
    rng = np.random.default_rng(2)
    gaps = np.exp(0.3 * rng.standard_normal(1000))
    few, many = (log_noise(gaps, "p90", samples=n) for n in (10, 1000))
    assert few > 5 * many


def test_a_judgement_states_its_noise_and_a_line_of_before_does_without():
    answers = tuple(RequestRecord(i, 0.0, Exchange(0.0, (0.5, 1.0 + i / 100))) for i in range(40))
    judged = judge_level(
        LevelRun(LevelSpec(0, Load(concurrency=8), num_requests=40), 1, answers), (parse_slo("e2e_p90<=2s"),)
    )
    stored = judged.to_json()
    assert Judgement.from_json(stored) == judged
    assert 0 < judged.noise < 0.1
    del stored["noise"]
    line = level_of(search=stored, concurrency=8, requests=40)
    assert trial(line, full_requests=29).noise == pytest.approx(0.5 / math.sqrt(40))


def test_a_sure_miss_beside_a_jump_is_no_vague_level():
    """An eighth of the answers take 15 s, the others 1: the p90 is vague, a sure miss is not."""
    times = [1.0] * 32 + [15.0] * 8 + [1.0] * 24
    answers = tuple(RequestRecord(i, 0.0, Exchange(0.0, (t / 2, t))) for i, t in enumerate(times))
    level = LevelRun(LevelSpec(0, Load(concurrency=32), num_requests=64), 1, answers)
    judged = judge_level(level, (parse_slo("e2e_p90<=2s"),))
    line = Level(0, 1, Load(concurrency=32), requests=64, search=judged)
    found = trial(line, full_requests=None)
    assert (judged.passed, judged.sure, judged.noise) == (False, False, UNKNOWN_NOISE)
    assert found.noise == UNKNOWN_NOISE
    line = replace(line, search=replace(judged, sure=True))
    sure = trial(line, full_requests=None)
    assert sure.noise == pytest.approx(math.log(7.5) / 2.33)


def test_levels_that_get_faster_are_pooled_with_their_neighbours():
    """Logarithms of 1.2 and 0.8 have a mean below 0, of 1.3 and 0.8 above; a surer one counts."""
    first, faster, last = tried(4, 0.5), tried(12, 0.8), tried(16, 1.5)
    assert loads(bracket([first, tried(8, 1.2), faster, last])) == (12, 16)
    assert loads(bracket([first, tried(8, 1.3), faster, last])) == (4, 8)
    surer = tried(12, 0.8, noise=0.02)
    assert loads(bracket([first, tried(8, 1.3), surer, last])) == (12, 16)
