"""What an interval grows with: load, lengths, limits of additive times, engines, saturation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.fit.discrepancy import (
    ERRORS,
    UNSCALED,
    ErrorScales,
    Observation,
    error_covariance,
    measured_covariance,
)
from lmi_bench.analysis.fit.fit import fit_cells, fit_of_profile, prior_fit
from lmi_bench.analysis.fit.from_run import profile_of_fit
from lmi_bench.analysis.fit.measured_tables import read_table
from lmi_bench.analysis.fit.uncertainty import Z80, Uncertainty, estimates, octaves_beyond
from lmi_bench.analysis.fit.validation import fitted_rows, validate
from lmi_bench.analysis.level.cells import capacity_tokens_per_s, predict_cell
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, SGLANG_PRIOR, TGI_2023, VLLM_0_12
from lmi_bench.analysis.model.measured_level import MeasuredLevel, marks_of
from lmi_bench.analysis.model.profiles import log_value, with_logs
from lmi_bench.analysis.model.setup import Parallelism, PrefillPool, Setup, Speculation
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import bare_machine, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.jobs.calibrate import validate as validate_job
from lmi_bench.jobs.settings.plan import ValidateSettings
from lmi_bench.models.hf_config import ARCHITECTURES
from lmi_bench.targets.profiles import SHIPPED, find_profile

TTFT = "ttft_mean_s"
PLAIN = {"growth": 0.5, "blind_widen": 1.0, "ttft_blind_widen": 1.0, "engine_sd": 0.2}
HEAD = (
    "model,accelerator,tp,dtype,input_tokens,output_tokens,concurrency_or_rate,"
    "throughput_tokens_per_s,ttft_ms,itl_ms,engine\n"
)
LINE = "Llama 3.1 8B,H100,1,float16,512,256,{},{},{},{},vllm 0.9\n"


def validated(rows, **options):
    return validate(rows, fitted_rows(rows, **options))


def cell(users=1, *, prompt=256, answer=256, machine="ml.g5.12xlarge", degree=4):
    return MeasuredLevel(
        Setup(find_model("llama-2-7b"), find_instance(machine), degree, "float16"),
        input_tokens=prompt,
        output_tokens=answer,
        load=Load(users),
        num_requests=3 * users,
    )


@pytest.fixture
def plain_errors():
    """Constants whose factors are easy to follow by hand."""
    token = ERRORS.set(replace(ERRORS.get(), **PLAIN))
    yield ERRORS.get()
    ERRORS.reset(token)


def test_the_error_grows_with_each_doubling_of_a_copys_users_beyond_eight(plain_errors):
    assert [plain_errors.growth_at(cell(n), ttft=False) for n in (1, 8, 16, 64)] == [1, 1, 1.5, 2.5]
    two = replace(cell(64), replicas=8)
    assert plain_errors.growth_at(two, ttft=False) == 1


def test_lengths_count_beyond_the_calibrated_ones_in_doublings():
    """1,024 of 256 are two doublings, 64 of 256 two the other way; both: their hypotenuse."""
    fit = replace(prior_fit(TGI_2023, [cell()]), cells=(cell(), cell(prompt=512)))
    assert octaves_beyond(fit, cell(prompt=300)) == 0
    assert octaves_beyond(fit, cell(prompt=2048)) == pytest.approx(2)
    assert octaves_beyond(fit, cell(prompt=2048, answer=64)) == pytest.approx(math.hypot(2, 2))
    assert octaves_beyond(fit, cell(8)) == pytest.approx(3)


FITTED = [name for name, profile in SHIPPED.items() if profile.accelerators]


@pytest.mark.parametrize("name", FITTED)
def test_beyond_the_lengths_and_loads_of_its_fit_a_shipped_profile_is_less_sure(name):
    """16 times the longest prompt, and 16 times the most users, against the middle of the fit."""
    profile = SHIPPED[name]
    assert profile.fitted_lengths, f"{name} does not say what it was fitted to"
    least, most = profile.fitted_lengths
    shape = replace(find_model(profile.models[0]), max_positions=10**6)
    machine = bare_machine(find_accelerator(profile.accelerators[0]), 8)
    users = math.isqrt(least[2] * most[2]) if len(most) > 2 else 8
    inside = MeasuredLevel(
        Setup(shape, machine, 1 if name in ("vllm-0.19", "bundled-h200") else 8, profile.formats[0]),  # as fitted
        input_tokens=math.isqrt(least[0] * most[0]),
        output_tokens=math.isqrt(least[1] * most[1]),
        load=Load(users),
        num_requests=3 * users,
    )
    longer = replace(inside, input_tokens=16 * most[0])
    cells = [inside, longer]
    if len(most) > 2:  # not of an open loop, whose users no table states
        cells.append(replace(inside, load=Load(16 * most[2])))
    known, *others = (
        {metric: said.high / said.low for metric, said in found.items()}
        for found in (estimates(prior_fit(profile, [c]), c, ["tpot_mean_s", TTFT]) for c in cells)
    )
    for other in others:
        assert all(other[metric] > known[metric] for metric in known)


def test_the_bundled_engine_s_profile_is_of_its_own_levels_and_models():
    profile = find_profile("bundled-h200")
    assert "bundled engine with Triton" in profile.provenance
    assert "3 levels of one model, Qwen3 8B BF16, on one H200" in profile.provenance
    assert set(profile.architectures) == set(ARCHITECTURES), "write the engine's families into bundled_h200.json"
    levels = [row.cell for row in read_table(Path(__file__).parents[3] / "benchmarks/results/engine_gpu_levels.csv")]
    assert set(profile.fitted_cells) == marks_of(levels)
    for level in levels:
        assert predict_cell(profile, level).tpot_mean_s == pytest.approx(level.tpot_mean_s, rel=0.2)


@pytest.mark.parametrize(("device", "build"), [("H100-SXM", 0.085), ("MI300X", 0.25)])
def test_builds_and_splits_that_no_cell_has_are_less_sure(device, build):
    """A build differs by 8.5 or 25 % from those of its name, a split by 15 % from other splits:
    what one measured level says of levels of its own day and split, and of others."""
    setup = Setup(find_model("mixtral-8x7b"), bare_machine(find_accelerator(device), 8), 8, "float16")
    base = MeasuredLevel(setup, 512, 256, Load(4), 40, measured_day=1000)
    experts = replace(setup, parallelism=Parallelism(expert_parallel=True))
    late, split = replace(base, measured_day=2000), replace(base, setup=experts)

    def variances(cells, **options):
        items = [Observation(each, "tpot_mean_s") for each in cells]
        return error_covariance(items, items, **options)

    found, bare = (variances([base, base, late, split], offsets=offsets) for offsets in (True, False))
    offsets = found - bare
    assert offsets[0, 1] == pytest.approx(build**2)
    assert offsets[0, 2] == pytest.approx(0, abs=1e-9)
    assert offsets[0, 3] == pytest.approx(build**2)
    assert offsets[3, 3] == pytest.approx(build**2 + 0.15**2)


def mixture(users=4, *, experts=False, drafts=None, day=1000, prefill=None):
    split = Parallelism(expert_parallel=experts)
    machine = bare_machine(find_accelerator("H100-SXM"), 8)
    setup = Setup(find_model("mixtral-8x7b"), machine, 8, "float16", None, drafts, split)
    pool = None
    if prefill is not None:
        pool = PrefillPool(replace(setup, parallelism=Parallelism(attention_groups=prefill)), 1)
    return MeasuredLevel(setup, 512, 256, Load(users), 10 * users, measured_day=day, prefill=pool, tpot_mean_s=0.01)


def offsets_of(cells, metric="tpot_mean_s", scales=UNSCALED):
    """What the levels have in common beside the model's error, shape (cells, cells)."""
    items = [Observation(each, metric) for each in cells]
    found, bare = (error_covariance(items, items, scales, offsets=each) for each in (True, False))
    return found - bare


def test_the_share_of_accepted_drafts_is_a_doubt_of_times_that_levels_with_drafts_share():
    plain, three = mixture(), mixture(drafts=Speculation(3, 0.65, own=True))
    one = mixture(drafts=Speculation(1, 0.65, own=True))
    build = 0.085**2
    assert offsets_of([plain, three, three, one]) == pytest.approx(
        build + 0.2**2 * np.array([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    )
    assert offsets_of([three], TTFT) == pytest.approx(build)


def test_builds_differ_less_alike_the_further_their_loads_are_apart():
    """Repeated levels of InferenceX on NVIDIA's devices: 0.6 two doublings apart, 0.4 four."""
    found = offsets_of([mixture(4), mixture(16), mixture(64)]) / 0.085**2
    assert 0.6 < found[0, 1] < 0.8
    assert 0.2 < found[0, 2] < 0.5


def test_users_of_pools_tell_less_of_their_steps_load():
    """Most of them wait for a worker that computes prompts: builds differ alike at all loads."""
    cells = [mixture(users, prefill=1) for users in (4, 64)]
    found = offsets_of(cells) - 0.25**2
    assert found[0, 1] > 0.7 * 0.085**2


def test_builds_change_first_tokens_alike_at_all_loads_and_steps_at_loads_that_are_near():
    cells = [mixture(users) for users in (4, 64)]
    build = 0.085**2
    assert offsets_of(cells)[0, 1] < 0.5 * build
    assert offsets_of(cells, TTFT)[0, 1] > 0.7 * build


def test_first_tokens_of_pools_share_the_doubt_of_the_pool_that_computes_prompts():
    """Pools that decode alike and split their prompt workers differently share none of it."""
    cells = [mixture(prefill=8), mixture(prefill=8, experts=True), mixture(prefill=1)]
    own = offsets_of(cells, TTFT) - offsets_of([replace(each, prefill=None) for each in cells], TTFT)
    assert own[0, 1] == pytest.approx(own[0, 0], rel=0.02)
    assert own[0, 2] == pytest.approx(0, abs=1e-9)


def test_a_tables_own_factor_is_of_the_models_error_and_not_of_offsets():
    cells = [mixture(), mixture(64, experts=True)]
    assert offsets_of(cells, scales=ErrorScales(times=2.0)) == pytest.approx(offsets_of(cells))
    items = [Observation(each, "tpot_mean_s") for each in cells]
    plain, twice = (measured_covariance(items, ErrorScales(times=scale), offsets=False) for scale in (1.0, 2.0))
    assert twice == pytest.approx(4 * plain)


def test_an_interval_is_as_wide_as_the_error_of_the_fits_own_estimate():
    """20,000 worlds drawn from priors and errors, each estimated as the fit does: least squares
    without offsets in common, then the correction by the measured cells with them."""
    cells = [mixture(experts=True), mixture(16, experts=True), mixture(64, experts=True)]
    fit = fit_cells(prior_fit(VLLM_0_12, cells).profile, cells)
    wanted = [
        Observation(each, "tpot_mean_s") for each in (mixture(16, experts=True), mixture(16), mixture(16, day=1400))
    ]
    known, chance = list(fit.observations), np.random.default_rng(3)
    slopes = np.concatenate([fit.jacobian[1:2]] * 3)
    slopes = slopes * np.array([[1.0], [1.3], [0.7]])
    _, variance = fit.corrected(wanted, slopes)
    both = [*known, *wanted]
    errors = chance.multivariate_normal(np.zeros(6), error_covariance(both, both, fit.scales), size=20_000)
    plain = measured_covariance(known, fit.scales, offsets=False)
    noise = plain - error_covariance(known, known, fit.scales, offsets=False)
    errors[:, :3] += chance.multivariate_normal(np.zeros(3), noise, size=20_000)
    moved = chance.normal(size=(20_000, len(fit.names))) * fit.prior_sd
    measured = moved @ fit.jacobian.T + errors[:, :3]
    prior = np.diag(fit.prior_sd**2)
    seen = fit.jacobian @ prior @ fit.jacobian.T + plain
    found = np.linalg.solve(seen, measured.T).T @ fit.jacobian @ prior
    left = measured - found @ fit.jacobian.T
    within = measured_covariance(known, fit.scales)
    shift = left @ np.linalg.solve(within, error_covariance(known, wanted, fit.scales))
    missed = moved @ slopes.T + errors[:, 3:] - (found @ slopes.T + shift)
    assert variance == pytest.approx(missed.var(axis=0), rel=0.04)


def test_a_profile_with_its_levels_predicts_with_the_fits_own_intervals():
    cells = [replace(cell(users), throughput_tokens_per_s=rate) for users, rate in ((1, 30.0), (8, 200.0), (32, 500.0))]
    fit = fit_cells(EAGER_GPU_PRIOR, cells)
    profile = profile_of_fit(fit, fitted_on="three", fitted_date="now", keep_levels=True)
    asked = [cell(16), cell(4, prompt=512)]
    for each in asked:
        own, again = (
            estimates(found, each, ["throughput_tokens_per_s"])["throughput_tokens_per_s"]
            for found in (fit, fit_of_profile(profile, [each]))
        )
        assert (again.low, again.high) == pytest.approx((own.low, own.high), rel=1e-3)


def test_an_additive_time_with_only_a_limit_reaches_to_it_for_long_prompts(plain_errors):
    """Up to 0.2 ms a token with 80 %: 0.77 s of a prompt of 3,840 tokens, 0.05 s of one of 256."""
    for prompt in (256, 3840):
        level = cell(prompt=prompt, machine="ml.p4d.24xlarge", degree=1)
        known = replace(EAGER_GPU_PRIOR, log_sd={**EAGER_GPU_PRIOR.log_sd})
        sure = replace(known, log_sd={**known.log_sd, "host_per_prompt_token_s": 0.0})
        ttft = predict_cell(known, level).ttft_mean_s
        wide, narrow = (
            math.log(found.high / found.value)
            for found in (estimates(prior_fit(each, [level]), level, [TTFT])[TTFT] for each in (known, sure))
        )
        own = math.sqrt(wide**2 - narrow**2) / Z80 * ttft
        assert own == pytest.approx(0.78 * 2e-4 * prompt, rel=0.05)


def test_a_value_with_only_a_limit_may_be_zero_but_not_below():
    names = ["host_per_prompt_token_s"]
    assert log_value(EAGER_GPU_PRIOR, names[0]) == pytest.approx(5e-6 / 2e-4)
    moved = with_logs(EAGER_GPU_PRIOR, names, prior_fit(EAGER_GPU_PRIOR, []).prior_sd[:1] * 0 - 1.0)
    assert moved.parameters.host_per_prompt_token_s == 0.0


def test_an_engine_that_nobody_named_has_the_spread_between_engines(plain_errors):
    """Variances add: 0.2 squared of the logarithm."""
    level = cell(machine="ml.p4d.24xlarge", degree=1)

    def reach(name):
        fit = prior_fit(find_profile(name), [level])
        found = estimates(fit, level, ["tpot_mean_s"])["tpot_mean_s"]
        return math.log(found.value / found.low) / Z80

    assert reach(None) ** 2 - reach("vllm") ** 2 == pytest.approx(0.04, rel=0.05)


def test_levels_of_an_open_loop_beyond_capacity_have_wide_intervals_instead_of_none(tmp_path):
    path = tmp_path / "open.csv"
    rates = (4, 40, 100)
    path.write_text(HEAD + "".join(LINE.format(f"rate={r}/s", 256 * r, 60, 9) for r in rates))
    judged, _ = validated(read_table(path))
    widths = []
    for row in judged:
        said = row.figures["ttft_ms"]
        assert said.low < said.value < said.high
        widths.append(said.high / said.low)
    assert widths[-1] > widths[0]


def test_a_blind_validation_states_measured_figures_and_the_users_under_an_slo(tmp_path):
    """Measured: 8 users keep 10 ms, 64 do not. Predicted is one of the table's loads, or none."""
    path = tmp_path / "closed.csv"
    path.write_text(
        HEAD + LINE.format("c=1", 120, 20, 7) + LINE.format("c=8", 900, 30, 9) + LINE.format("c=64", 3000, 200, 21)
    )
    settings = ValidateSettings(sources=(path,), calibrate_cells=0, slo=("tpot<=10ms",))
    rows = validate_job(settings).to_json()
    assert [row["measured_tpot_ms"] for row in rows] == pytest.approx([7, 9, 21])
    assert not any(row["calibrated"] for row in rows)
    (under,) = rows[0]["under_slo"]
    assert (under["load"], under["measured"]) == ("users", 8)
    assert under["predicted"] in (None, 1, 8, 64)
    assert (under["low"] or 0) <= (under["predicted"] or 0) <= (under["high"] or 0)


def test_where_the_load_may_exceed_the_capacity_latencies_reach_to_those_of_slower_steps():
    """At 70 % of the capacity, whose interval is wider than a third: a queue may grow."""
    setup = Setup(find_model("mixtral-8x7b"), bare_machine(find_accelerator("H100-SXM"), 2), 2, "float16")
    level = MeasuredLevel(setup, 512, 256, Load(8), 80)
    fit = prior_fit(SGLANG_PRIOR, [level])
    lasting = replace(level, load=Load(rate_per_s=1.0), num_requests=300)
    rate = 0.7 * capacity_tokens_per_s(fit.profile, lasting) / level.output_tokens
    cell = replace(lasting, load=Load(rate_per_s=rate))
    sure = Uncertainty.of(fit, cell)
    slower = 1 / sure.capacity_tokens_per_s.low * sure.capacity_tokens_per_s.value
    assert slower > 1 / 0.7
    late = predict_cell(fit.profile, replace(cell, num_requests=300), slower=slower)
    alone = predict_cell(fit.profile, cell)
    assert sure.factors[TTFT].up >= 0.8 * late.ttft_mean_s / alone.ttft_mean_s > 2
