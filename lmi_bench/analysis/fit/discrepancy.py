"""The errors that a fitted step-time model leaves, and how cells share them.

The model's error is a smooth function of the load on one machine and degree: a Gaussian process on
the logarithm of time (Kennedy and O'Hagan 2001, section 4), beside offsets of builds and splits.
Throughput errs by the inverse factor; in an open loop, where longer steps mean more sequences, by
the growth that the simulation gives. One scale compares the errors of times per token and
throughputs with the expected ones, another those of TTFT, which depends on how requests coincide.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.level.cells import growth_with_step_times, waits_for_slots
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.errors import InputError

# Noise of published figures, standard deviations of logarithms, before a scale is found.
_QUEUED_TTFT_ERROR = 0.5  # error of a wait for slots, which depends strongly on their number
_NOISE: dict[Metric, float] = {
    "throughput_tokens_per_s": 0.025,
    "latency_p90_s_per_token": 0.045,
    "latency_mean_s_per_token": 0.03,
    "ttft_mean_s": 0.12,
    "tpot_mean_s": 0.025,
}
_KEEPS_UP = 0.95  # share of the offered tokens; the rest is answered after the last arrival
_LEAST_SENSITIVITY = 0.05
# limits of the simulated sensitivity: a queue's growth beyond that is random
_SENSITIVITIES: dict[Metric, tuple[float, float]] = {
    "throughput_tokens_per_s": (_LEAST_SENSITIVITY, 1.0),
    "ttft_mean_s": (0.7, 4.0),
}
_TIME_SENSITIVITIES = (0.7, 4.0)
_SOFTWARE_DAYS = 45.0  # over which nightly builds of an engine change
_ACROSS_SOFTWARE = 0.3  # correlation that remains between builds far apart
# offsets that levels have in common: of a build (repeated levels of InferenceX, which correlate the
# less the further their loads are apart: on NVIDIA's devices by 0.6 two doublings apart, 0.4 four;
# the users of pools do not tell the load of their steps), of a split (EP against TP on B200, 10 to
# 40 %), of separate pools, whose router and transfer no profile knows, and of drafted tokens, whose
# share accepted depends on the text: three drafts give 1.9 to 2.8 tokens a step with 50 to 75 %
_BUILD_SD = {"nvidia": 0.085, "amd": 0.25}
_USUAL_BUILD = 0.085  # which `setup_sd` contains where a table has no days
_BUILD_DAYS, _BUILD_OCTAVES, _FAR_OCTAVES = 20.0, 2.5, 5.5
_SPLIT_SD, _POOLS_SD, _POOLS_TTFT_SD, _DRAFTS_SD = 0.15, 0.25, 1.4, 0.2
_LIGHT_LOAD = 8.0  # users of a copy up to which the model's error is constant


@dataclass(frozen=True, slots=True)
class ErrorConstants:
    """How wrong the model is, estimated over the published tables by planner_accuracy.py.

    step_sd, ttft_sd          error's standard deviation at a light load, of logarithms
    growth, ttft_growth       relative growth of an interval with each doubling of users beyond
                              eight; the fit's weights do not grow, or heavy loads hardly count
    load_, prompt_, output_octaves   doublings over which the error changes
    lasting_share             of the error's variance: the same at all loads of a machine and degree
    across_degrees            correlation between degrees of one machine; ttft_across_degrees
    noise                     factor on the noise of figures other than TTFT
    scale, ttft_scale         centre of the prior of a table's own factor on errors and noise
    beyond_sd, ttft_beyond_sd added for each doubling of a length outside the calibrated ones
    setup_sd, ttft_setup_sd   between set-ups of one name, before a level of one's own is measured
    engine_sd                 between engines, where none is named
    widen, ttft_widen         conformal factor on an interval's width, by levels of other tables;
                              blind_widen, ttft_blind_widen: before a level of one's own
    """

    step_sd: float
    ttft_sd: float
    growth: float
    ttft_growth: float
    load_octaves: float
    prompt_octaves: float
    output_octaves: float
    lasting_share: float
    across_degrees: float
    ttft_across_degrees: float
    noise: float
    scale: float
    ttft_scale: float
    beyond_sd: float
    ttft_beyond_sd: float
    setup_sd: float
    ttft_setup_sd: float
    engine_sd: float
    widen: float
    ttft_widen: float
    blind_widen: float
    ttft_blind_widen: float

    def growth_at(self, cell: MeasuredLevel, *, ttft: bool) -> float:
        """Factor of the error at a cell's load, 1 at a light one."""
        users = max(1.0, cell.concurrency / cell.replicas / _LIGHT_LOAD)
        return 1 + (self.ttft_growth if ttft else self.growth) * math.log2(users)

    def widened(self, metric: Metric, *, blind: bool) -> float:
        """Conformal factor on the width of a figure's interval."""
        name = "blind_widen" if blind else "widen"
        return float(getattr(self, f"ttft_{name}" if metric == "ttft_mean_s" else name))


_FILE = files("lmi_bench.catalog") / "data" / "planner_errors.json"
_VALUES: Final[dict[str, Any]] = json.loads(_FILE.read_text("utf-8"))
del _VALUES["about"]
_SHIPPED: Final = ErrorConstants(**_VALUES)
ERRORS: Final[ContextVar[ErrorConstants]] = ContextVar("ERRORS", default=_SHIPPED)
"""The constants in use; a judgement of a table sets those estimated without that table."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One figure of one cell.

    sensitivity  relative change of the figure with the step times, 1 in a closed loop: the
                 throughput of an open loop that keeps up is the rate, however long steps take, and
                 its times grow faster than the steps
    queued       True if users wait for a slot: the time to first token is then as uncertain as the
                 number of slots
    """

    cell: MeasuredLevel
    metric: Metric
    sensitivity: float = 1.0
    queued: bool = False

    @property
    def is_ttft(self) -> bool:
        """Whether the figure depends on queues and prompts more than on decode steps."""
        return self.metric == "ttft_mean_s"

    @property
    def sign(self) -> int:
        """-1 where a longer step makes the figure smaller."""
        return -1 if self.metric == "throughput_tokens_per_s" else 1

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the measurement and of a wait for slots: each cell has its own."""
        if self.queued and self.is_ttft:
            return math.hypot(_NOISE[self.metric], _QUEUED_TTFT_ERROR)
        return _NOISE[self.metric] * (1.0 if self.is_ttft else ERRORS.get().noise)

    @property
    def error_sd(self) -> float:
        """Standard deviation of the model's error."""
        return (ERRORS.get().ttft_sd if self.is_ttft else ERRORS.get().step_sd) * self.sensitivity

    @property
    def total_sd(self) -> float:
        """Standard deviation of model and measurement together."""
        return math.hypot(self.noise_sd, self.error_sd)


def observe(
    cell: MeasuredLevel,
    metric: Metric,
    throughput_tokens_per_s: float | None,
    growth: Mapping[Metric, float] | None = None,
    *,
    queued: bool = False,
) -> Observation:
    """A figure of a cell whose throughput, measured or predicted, is known.

    growth  relative growth of an open loop's figures with the step times
            (`cells.growth_with_step_times`); None: estimated from the share of the load served
    queued  True if the users of its closed loop wait for slots (`cells.waits_for_slots`)
    """
    sensitivity = 1.0
    if cell.rate_per_s is not None and growth is not None:
        least, most = _SENSITIVITIES.get(metric, _TIME_SENSITIVITIES)
        sensitivity = min(most, max(least, abs(growth[metric])))
    elif metric == "throughput_tokens_per_s" and cell.rate_per_s is not None:
        served = (throughput_tokens_per_s or 0.0) / (cell.rate_per_s * cell.output_tokens)
        sensitivity = min(1.0, max(_LEAST_SENSITIVITY, (_KEEPS_UP - served) / 0.2))
    return Observation(cell, metric, sensitivity, queued)


def observations_of(cells: Sequence[MeasuredLevel], profile: EngineProfile | None = None) -> list[Observation]:
    """Every measured figure of the cells, in order, except those implied by others of the cell.

    A mean end-to-end time follows from the time to first token and those of the later ones.

    profile  gives the growth of an open loop's figures with the step times
    """
    return [
        observe(cell, metric, cell.throughput_tokens_per_s, growth, queued=queued)
        for cell in cells
        for growth in [_growth(cell, profile)]
        for queued in [profile is not None and waits_for_slots(profile, cell)]
        for metric in _NOISE
        if cell.measured(metric) is not None
        and not (metric == "latency_mean_s_per_token" and cell.tpot_mean_s is not None)
    ]


def _growth(cell: MeasuredLevel, profile: EngineProfile | None) -> Mapping[Metric, float] | None:
    if profile is None or cell.rate_per_s is None:
        return None
    try:
        return growth_with_step_times(profile, cell)
    except InputError:
        return None  # the prediction of the cell raises an error with the reason


@dataclass(frozen=True, slots=True)
class ErrorScales:
    """Factors of the standard deviations above: for times to first token, and for the others."""

    times: float = 1.0
    ttft: float = 1.0

    def of(self, items: Sequence[Observation]) -> NDArray[np.float64]:
        """The factor of each figure, shape (items,)."""
        return np.array([self.ttft if item.is_ttft else self.times for item in items])


UNSCALED: Final = ErrorScales()


def error_covariance(
    left: Sequence[Observation], right: Sequence[Observation], scales: ErrorScales = UNSCALED, *, offsets: bool = True
) -> NDArray[np.float64]:
    """Covariance of the model's errors, shape (left, right), with the sign of each figure.

    scales   factors on the errors, not on the offsets, which the tables determine together
    offsets  with those that levels of one build of the engine, or of one split, have in common
    """

    def columns(items: Sequence[Observation]) -> tuple[NDArray[np.float64], ...]:
        cells = [item.cell for item in items]
        return (
            np.array([math.log2(max(cell.load.value / cell.replicas, 1e-3)) for cell in cells]),
            np.array([math.log2(cell.input_tokens) for cell in cells]),
            np.array([math.log2(cell.output_tokens) for cell in cells]),
            np.array([hash(_split(cell)) for cell in cells]),
            np.array([hash(_machine(item)) for item in items]),
            np.array([math.nan if (day := cell.measured_day) is None else day for cell in cells]),
            np.array([item.is_ttft for item in items]),
            np.array([item.sign * item.error_sd for item in items]) * scales.of(items),
            *np.array([_offsets(item) for item in items]).reshape(-1, 4, 2).T.swapaxes(0, 1),
        )

    load_l, prompt_l, output_l, degree_l, machine_l, day_l, ttft_l, sd_l, *offset_l = columns(left)
    load_r, prompt_r, output_r, degree_r, machine_r, day_r, ttft_r, sd_r, *offset_r = columns(right)
    known = ERRORS.get()

    def near(one: NDArray[np.float64], other: NDArray[np.float64], octaves: float) -> Any:
        return np.exp(-0.5 * (np.subtract.outer(one, other) / octaves) ** 2)

    lasting = known.lasting_share
    loads = lasting + (1 - lasting) * near(load_l, load_r, known.load_octaves)
    lengths = near(prompt_l, prompt_r, known.prompt_octaves)
    lengths = lengths * near(output_l, output_r, known.output_octaves)
    across = np.where(ttft_l, known.ttft_across_degrees, known.across_degrees)[:, None]
    degree = np.where(np.equal.outer(degree_l, degree_r), 1.0, across)
    kin = np.equal.outer(ttft_l, ttft_r)
    same = np.equal.outer(machine_l, machine_r) & kin
    apart = np.nan_to_num(np.abs(np.subtract.outer(day_l, day_r)))
    software = _ACROSS_SOFTWARE + (1 - _ACROSS_SOFTWARE) * np.exp(-apart / _SOFTWARE_DAYS)
    found = same * loads * degree * lengths * software * np.outer(sd_l, sd_r)
    if offsets:
        far = np.array([[item.is_ttft or item.cell.prefill is not None] for item in left])
        near_loads = near(load_l, load_r, _BUILD_OCTAVES), near(load_l, load_r, _FAR_OCTAVES)
        builds = np.exp(-apart / _BUILD_DAYS) * np.where(far.reshape(-1, 1), *near_loads[::-1])
        pools = np.where(ttft_l[:, None], loads * lengths, 1.0)
        shares = (builds, 1.0, pools, lengths)
        for share, one, other in zip(shares, offset_l, offset_r, strict=True):
            alike = np.equal.outer(one[0], other[0]) & kin
            found = found + alike * share * np.outer(one[1], other[1])
    return np.asarray(found, dtype=np.float64)


def _offsets(item: Observation) -> list[tuple[float, float]]:
    """What figures that have an offset in common share, and its signed standard deviation.

    Of a build (without a day only what builds differ by beyond set-ups), a split, separate pools
    (TTFT is due to the split of the workers that compute prompts), and drafted tokens.
    """
    cell, factor = item.cell, item.sign * item.sensitivity
    label, pool, drafts = cell.setup.parallelism.label, cell.prefill, cell.setup.speculation
    build = _BUILD_SD.get(cell.setup.instance.accelerator.vendor, _USUAL_BUILD)
    if cell.measured_day is None:
        build = math.sqrt(build**2 - _USUAL_BUILD**2)
    own_sd, of_pools = _POOLS_SD * (pool is not None), label
    if pool is not None and item.is_ttft:
        own_sd, of_pools = _POOLS_TTFT_SD, pool.setup.parallelism.label
    found: list[tuple[object, float]] = [
        ("", build),
        ((label, pool is None), _SPLIT_SD * bool(label)),
        (of_pools, own_sd),
        (drafts, 0.0 if item.is_ttft or drafts is None else _DRAFTS_SD),
    ]
    return [(float(hash(key)), factor * sd) for key, sd in found]


def measured_covariance(
    items: Sequence[Observation], scales: ErrorScales = UNSCALED, *, offsets: bool = True
) -> NDArray[np.float64]:
    """Covariance of measured figures about the model: its errors and the measurements' noise."""
    noise = np.diag(np.square(scales.of(items) * [item.noise_sd for item in items]))
    return np.asarray(error_covariance(items, items, scales, offsets=offsets) + noise)


def _split(cell: MeasuredLevel) -> tuple[object, ...]:
    """How a copy is split over devices, and whether it drafts."""
    setup = cell.setup
    prefill = None if cell.prefill is None else cell.prefill.setup.parallelism
    return setup.tensor_parallel, setup.parallelism, setup.speculation, prefill


def _machine(item: Observation) -> tuple[object, ...]:
    """What figures of one error have in common. A table that names accelerators instead of machines
    says nothing of the machine, so its degrees share the error of TTFT alone."""
    setup = item.cell.setup
    return (
        setup.instance.accelerator.name,
        0 if item.is_ttft else setup.instance.num_accelerators,
        setup.shape.name,
        setup.dtype,
        item.cell.rate_per_s is None,
    )


OUTLIER = 2.5  # standard deviations at which a figure's residual is clipped

_TIME_SCALES = np.geomspace(0.65, 2.5, 15)  # repeated published levels differ by the least
_TTFT_SCALES = np.geomspace(0.4, 2.5, 12)
_SCALE_LOG_SD = 0.5


def find_scales(
    observations: Sequence[Observation],
    residuals: NDArray[np.float64],
    jacobian: NDArray[np.float64],
    moved: NDArray[np.float64],
    prior_sd: NDArray[np.float64],
) -> tuple[float, ErrorScales]:
    """The likeliest common scale of error and noise, and the root mean square of each scale.

    residuals  ln(measured / predicted), shape (observations,)
    jacobian   d ln(figure) / d ln(parameter), shape (observations, parameters)
    moved      distance of each parameter's logarithm from its prior, shape (parameters,)

    The mean is over the posterior of the scales, which a few cells leave wide. The separate scales
    widen intervals; the common scale weights the cells against the prior.
    """
    error = measured_covariance(observations)
    plain = measured_covariance(observations, offsets=False)
    limits = OUTLIER * np.sqrt(np.diag(error))
    from_prior = np.clip(residuals, -limits, limits) + jacobian @ moved
    explained = jacobian @ np.diag(prior_sd**2) @ jacobian.T
    has_ttft = any(item.is_ttft for item in observations)

    def cost(times: float, ttft: float) -> float:
        widths = ErrorScales(times, ttft).of(observations)
        covariance = explained + np.outer(widths, widths) * plain + (error - plain)
        _, determinant = np.linalg.slogdet(covariance)
        return float(determinant + from_prior @ np.linalg.solve(covariance, from_prior))

    times = _TIME_SCALES.tolist()
    ttfts = _TTFT_SCALES.tolist() if has_ttft else [ERRORS.get().ttft_scale]
    common = min(times, key=lambda scale: cost(scale, scale) + _prior_cost(scale))
    grid = list(itertools.product(times, ttfts))
    costs = [cost(*pair) + _prior_cost(pair[0]) + _prior_cost(pair[1], ttft=True) for pair in grid]
    weights = np.exp((min(costs) - np.array(costs)) / 2)
    mean_squares = np.average(np.square(grid), axis=0, weights=weights)
    if not has_ttft:  # the scale's prior alone
        mean_squares[1] = (ERRORS.get().ttft_scale * math.exp(_SCALE_LOG_SD**2)) ** 2
    return common, ErrorScales(*np.sqrt(mean_squares).tolist())


def _prior_cost(scale: float, *, ttft: bool = False) -> float:
    centre = ERRORS.get().ttft_scale if ttft else ERRORS.get().scale
    return (math.log(scale / centre) / _SCALE_LOG_SD) ** 2
