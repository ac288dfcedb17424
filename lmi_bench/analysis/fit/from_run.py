"""Measured levels of runs and of other tools' files as cells, and the profile fitted to them.

A level counts if all its requests are equal and were answered, and sent when they were due. Levels
of a simulated run get 80 % intervals from the profile that predicted its step times.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmi_bench.analysis.fit.fit import Fit, fit_cells
from lmi_bench.analysis.fit.uncertainty import FIGURE_METRICS, Uncertainty, shown_value
from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.model.builtin_profiles import FEW_BITS, prior_of_engine, shipped_profile
from lmi_bench.analysis.model.checkpoint_dtype import planned_dtype
from lmi_bench.analysis.model.measured_level import LENGTH_SPREAD, MeasuredLevel, marks_of
from lmi_bench.analysis.model.memory import weight_format
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, EngineProfile, profile_from_json
from lmi_bench.analysis.model.setup import Setup, Speculation
from lmi_bench.analysis.results.repeats import steady_lines
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.json_value import JsonValue
from lmi_bench.core.lengths import parse_lengths
from lmi_bench.core.level import GENERATOR_LIMITED, Level
from lmi_bench.core.run_store import Run
from lmi_bench.core.units import ms_to_s
from lmi_bench.engine.scheduling.config import KvLayout
from lmi_bench.models.folder import is_model_folder
from lmi_bench.models.shape import ModelShape

# settings of a scenario with which its requests differ in length
_DRAWN_LENGTHS = ("mix", "dataset", "input_lengths", "output_lengths", "trace", "turns", "conversations")
_ENGINES = ("vllm", "sglang", "tgi", "tensorrt", "trt", "atom")  # names that servers and tables state
_ACCURACY_KEYS = ("throughput_tokens_per_s", "latency_ms_per_token", "ttft_ms", "tpot_ms")


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run and its machine; tensor_parallel None: as the run's manifest states."""

    run: Run
    instance: Instance
    tensor_parallel: int | None = None

    @property
    def degree(self) -> int:
        """Tensor-parallel degree of one copy."""
        manifest = self.run.manifest
        asked = manifest.scenario.engine.tensor_parallel
        known = self.tensor_parallel or manifest.target.tensor_parallel
        return known or (asked if isinstance(asked, int) else 1)


def run_lengths(run: Run) -> tuple[int, int]:
    """Input and output tokens of the run's requests; an imported run's: the means of a level.

    Raises InputError if they are not equal, or not known.
    """
    workload = run.manifest.scenario.workload
    drawn = [name for name in _DRAWN_LENGTHS if getattr(workload, name)]
    if drawn and not run.manifest.imported_from:
        raise InputError(
            f"{run.path}: its requests differ in length ({', '.join(drawn)}); calibration needs a "
            "sweep of equal requests (--input-tokens N --output-tokens N)"
        )
    if not (workload.input_tokens and workload.output_tokens):
        return mean_lengths(run.path, run.levels[0])
    return workload.input_tokens, workload.output_tokens


def mean_lengths(source: Path, line: Level) -> tuple[int, int]:
    """Mean input and output tokens of a level's answers; raises InputError if they are unknown."""
    answered = line.sent - line.failed
    if not (line.input_tokens and line.output_tokens and answered):
        raise InputError(
            f"{source}: {line.name} does not state its input and output tokens, so it cannot be calibrated on"
        )
    tokens = line.input_tokens, line.output_tokens
    return max(1, round(tokens[0] / answered)), max(1, round(tokens[1] / answered))


def run_model(run: Run) -> str:
    """The name of the run's model at its target, or the folder that it was read from."""
    stated = run.manifest.scenario.model
    return stated if stated and is_model_folder(Path(stated)) else run.manifest.model


def run_dtype(run: Run) -> str:
    """Number format of the weights in the run."""
    facts, stated = run.manifest.target, run.manifest.scenario.engine.dtype
    if stated or facts.is_bundled:
        return stated or "bfloat16"
    return planned_dtype(run_model(run), facts.dtype)


def why_left_out(line: Level) -> str | None:
    """Why no profile can be fitted to a level; None where one can."""
    if line.errors:
        return f"{line.errors} failed request{'s' if line.errors > 1 else ''}"
    if line.stopped_by:
        return f"ended early by: {line.stopped_by}"
    if line.valid or _only_ttft_unsure(line):
        return None
    return line.invalid_reason or "invalid"


def _only_ttft_unsure(line: Level) -> bool:
    """Whether the level is invalid for its times to first token alone."""
    return not line.valid and (line.invalid_reason or "").startswith(GENERATOR_LIMITED)


def cells_from_run(
    placed: PlacedRun, shape: ModelShape, *, dtype: str | None = None, kv_dtype: str | None = None
) -> list[MeasuredLevel]:
    """The usable levels of a run as cells; raises InputError where there is none.

    dtype, kv_dtype  None: as the run's target states
    """
    run, facts = placed.run, placed.run.manifest.target
    input_tokens, output_tokens = run_lengths(run)
    if facts.replicas > 1:
        raise InputError(
            f"{run.path}: measured on {facts.replicas} replicas at once, but a profile "
            "describes one: sweep again without --replicas"
        )
    if facts.layout:
        raise InputError(f"{run.path}: no fit to a run knows its {facts.layout}: `lmi-bench calibrate` its table (CSV)")
    dtype, kv_dtype = dtype or run_dtype(run), kv_dtype or facts.kv_dtype
    setup = Setup(shape, placed.instance, placed.degree, dtype, kv_dtype=kv_dtype)
    drawn = parse_lengths(run.manifest.scenario.workload.output_lengths or "1")
    spread = (drawn.second - drawn.first) / (drawn.second + drawn.first) if drawn.kind == "uniform" else 0.0
    cells = []
    steady = steady_lines(run.levels)
    for line, records in zip(run.levels, run.records, strict=True):
        if why_left_out(line) is not None or line not in steady:
            continue
        if run.manifest.imported_from:  # its files may differ in length
            input_tokens, output_tokens = mean_lengths(run.path, line)
        elif line.input_tokens:  # the server may count others than were planned
            input_tokens = max(1, round(line.input_tokens / max(1, line.sent - line.failed)))
        answered_tokens = output_tokens
        if line.unplanned_lengths:  # not all servers generate the requested number
            answered_tokens = max(1, round(line.unplanned_lengths.output_tokens_mean))
        most = None
        if (limits := facts.scheduler) is not None:  # on running sequences
            held = limits.num_blocks * limits.block_size // (input_tokens + output_tokens)
            most = max(1, min(held, limits.max_rolling_batch_size))
        cell = _cell(setup, line, input_tokens, answered_tokens)
        cells.append(
            replace(
                cell,
                arrivals_s=tuple(each.due_s for each in records) if line.load.is_open else (),
                latency_mean_s_per_token=_mean_s(line, "latency_per_token"),
                max_sequences=most,
                length_spread=spread,
                ttft_mean_s=None if _only_ttft_unsure(line) else cell.ttft_mean_s,
            )
        )
    if not cells:
        raise InputError(
            f"{run.path}: no level can be calibrated on; sweep at least one concurrency without "
            "errors (--concurrency 1,4,16)"
        )
    return cells


def cell_of_summary(source: Path, line: Level, setup: Setup) -> MeasuredLevel:
    """A level of another tool's file as a cell, with the means of its lengths.

    Raises InputError where the file does not state its tokens.
    """
    cell = _cell(setup, line, *mean_lengths(source, line))
    return cell if line.load.is_open else replace(cell, length_spread=LENGTH_SPREAD)


def _cell(setup: Setup, line: Level, input_tokens: int, output_tokens: int) -> MeasuredLevel:
    tpot = line.of("tpot")
    statistic = "p50" if tpot.mean is None and tpot.p50 else "mean"  # another tool may have no mean
    return MeasuredLevel(
        setup,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        load=line.load,
        num_requests=line.sent,
        throughput_tokens_per_s=line.throughput_tokens_per_s,
        ttft_mean_s=_mean_s(line, "ttft", statistic),
        tpot_mean_s=_mean_s(line, "tpot", statistic),
        start_left_out=bool(line.start_requests),
        medians=statistic == "p50",
    )


def _mean_s(line: Level, metric: str, statistic: str = "mean") -> float | None:
    found_ms = line.of(metric).value(statistic)
    return None if not found_ms else ms_to_s(found_ms)


def profile_for_run(base: EngineProfile, run: Run) -> EngineProfile:
    """The base with the scheduler settings of the run's engine, if they are known."""
    scheduler = run.manifest.target.scheduler
    if scheduler is None:
        return base
    if scheduler.kv_layout not in tuple(KvLayout):
        raise InputError(f"{run.path}: its manifest has a KV layout {scheduler.kv_layout!r}")
    return replace(
        base,
        kv_layout=KvLayout(scheduler.kv_layout),
        max_batch_size=scheduler.max_rolling_batch_size,
        max_prefill_tokens=scheduler.max_rolling_batch_prefill_tokens,
        chunked_prefill=scheduler.chunked_prefill,
        block_size=scheduler.block_size,
        defaults="",
    )


def prior_for(engine: str, cells: Sequence[MeasuredLevel]) -> EngineProfile:
    """The profile to start a fit of that engine's levels from (`prior_of_engine`).

    It runs on the devices of the levels, since they were measured.
    """
    prior = prior_of_engine(
        engine,
        models={cell.setup.shape.name for cell in cells},
        accelerators={cell.setup.instance.accelerator.name for cell in cells},
        open_loop=any(cell.rate_per_s is not None for cell in cells),
        few_bits=all(weight_format(c.setup.dtype).nominal_bits < FEW_BITS for c in cells),
        marks=marks_of(cells),
    )
    vendors = {*prior.vendors, *(cell.setup.instance.accelerator.vendor for cell in cells)}
    return replace(prior, vendors=tuple(sorted(vendors)))


def prior_for_run(run: Run, cells: Sequence[MeasuredLevel]) -> EngineProfile:
    """`prior_for` of the engine that the run's server named; vLLM where it named none."""
    engine = run.manifest.target.engine.lower()
    if not engine.startswith(_ENGINES):
        return prior_for("vllm", cells)
    version = engine.partition(" ")[2]
    prior = prior_for("tgi 3.0" if engine == "tgi" else engine, cells)  # today's, not that of 2023
    return replace(prior, version=version) if version else prior


def calibrated_levels(runs: Sequence[Run]) -> str:
    """How many levels a profile is fitted to, and which are left out for what."""
    lines = [line for run in runs for line in steady_lines(run.levels)]
    out = [f"{line.name}: {why}" for line in lines if (why := why_left_out(line)) is not None]
    left_out = f"; left out: {'; '.join(out)}" if out else ""
    return f"calibrating on {len(lines) - len(out)} measured level(s){left_out}"


def calibrate_on_runs(
    base: EngineProfile | None,
    placed: Sequence[PlacedRun],
    shape: ModelShape,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
) -> tuple[EngineProfile, tuple["LevelAccuracy", ...]]:
    """The profile fitted to all usable levels of the runs, and its accuracy on them.

    base  prior of the fit; None: the prior of the engine that answered

    Raises InputError where no level can be used.
    """
    cells = [cell for each in placed for cell in cells_from_run(each, shape, dtype=dtype, kv_dtype=kv_dtype)]
    runs = [each.run for each in placed]
    machines = dict.fromkeys(each.instance.instance_type for each in placed)
    engine = profile_for_run(base or prior_for_run(runs[-1], cells), runs[-1])
    fitted = profile_of_fit(
        fit_cells(engine, cells),
        fitted_on=(
            f"{len(cells)} levels of {shape.name} on {', '.join(machines)} ({', '.join(run.path.name for run in runs)})"
        ),
        fitted_date=runs[-1].manifest.created_at[:10],
    )
    return fitted, accuracy_on(fitted, cells)


class Compared(NamedTuple):
    """A figure of a level, in the units of its line."""

    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class LevelAccuracy(JsonValue):
    """A profile's prediction of a level that it was fitted to; in a file a figure is a key."""

    concurrency: int
    figures: Mapping[str, Compared]

    def to_json(self) -> dict[str, Any]:
        """`{"concurrency": ..., METRIC: {"measured": ..., "predicted": ...}}`."""
        pairs = {key: pair._asdict() for key, pair in self.figures.items()}
        return {"concurrency": self.concurrency, **pairs}

    @classmethod
    def from_json(cls, content: object, where: str = "") -> "LevelAccuracy":
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        if not isinstance(content, Mapping):
            raise TypeError(f"{where} is {content!r}")
        pairs = dict(content)
        return cls(pairs.pop("concurrency"), {key: Compared(**pairs[key]) for key in pairs})


def accuracy_on(profile: EngineProfile, cells: Sequence[MeasuredLevel]) -> tuple[LevelAccuracy, ...]:
    """Predicted against measured for each cell."""
    levels = []
    for cell in cells:
        predicted, figures = predict_cell(profile, cell), {}
        for key in _ACCURACY_KEYS:
            metric = FIGURE_METRICS[key]
            measured = cell.measured(metric)
            if measured is not None:
                values = (measured, predicted.value(metric))
                figures[key] = Compared(*(shown_value(metric, value) for value in values))
        levels.append(LevelAccuracy(cell.concurrency, figures))
    return tuple(levels)


_IDENTIFIED = 0.7  # a posterior wider than this share of the prior is not identified
_LEAST_RESIDUAL = 0.03  # repeated measurements of one engine differ by as much


def profile_of_fit(
    fit: Fit, *, version: str | None = None, fitted_on: str, fitted_date: str, keep_levels: bool = False
) -> EngineProfile:
    """The fitted profile with its uncertainty and provenance.

    `log_sd` and `log_correlation` are the posterior's; `notes` name unidentified parameters.

    keep_levels  whether the profile holds its cells, so that they correct its predictions
    """
    sd = np.sqrt(np.diag(fit.covariance))
    parameters = [index for index, name in enumerate(fit.names) if name in PARAMETER_NAMES]
    kept = [
        fit.names[index]
        for index in parameters
        if sd[index] > _IDENTIFIED * fit.prior_sd[index] and fit.names[index] in _NAMED_IN_NOTES
    ]
    whole = np.eye(len(PARAMETER_NAMES))
    places = [PARAMETER_NAMES.index(fit.names[index]) for index in parameters]
    block = fit.covariance[np.ix_(parameters, parameters)]
    whole[np.ix_(places, places)] = block / np.outer(sd[parameters], sd[parameters])
    note = f"not identified by the profile's cells, so near their priors: {', '.join(kept)}"
    spread = 1.4826 * float(np.median(np.abs(fit.residuals)))  # the robust standard deviation
    profile = fit.profile
    return replace(
        profile,
        version=profile.version if version is None else version,
        fitted_on=fitted_on,
        fitted_date=fitted_date,
        accelerators=tuple(dict.fromkeys(one.setup.instance.accelerator.name for one in fit.cells)),
        models=tuple(dict.fromkeys(cell.setup.shape.name for cell in fit.cells)),
        log_sd={fit.names[index]: float(sd[index]) for index in parameters},
        log_correlation=tuple(tuple(row) for row in whole.tolist()),
        residual_log_sd=max(spread, _LEAST_RESIDUAL),
        error_scale=fit.scales.times if keep_levels else profile.error_scale,
        ttft_error_scale=fit.scales.ttft if keep_levels else profile.ttft_error_scale,
        levels=fit.cells if keep_levels else (),
        formats=tuple(dict.fromkeys(cell.setup.dtype for cell in fit.cells)),
        fitted_lengths=_lengths(fit.cells),
        fitted_cells=(),
        notes=(note,) if kept else (),
    )


def _lengths(cells: Sequence[MeasuredLevel]) -> tuple[tuple[int, ...], ...]:
    """The least and the most of each part of the cells' extents."""
    parts = [[n for n in each if n is not None] for each in zip_longest(*(c.extent for c in cells))]
    return tuple(map(min, parts)), tuple(map(max, parts))


# Parameters that the notes name; the time outside the engine affects only the time to first token.
_NAMED_IN_NOTES = frozenset(PARAMETER_NAMES) - {"request_overhead_s"}


def level_uncertainties(run: Run, lines: Sequence[Level]) -> dict[int, Uncertainty]:
    """The uncertainty of each predicted level by the `id` of its line, as far as it is known."""
    wanted = run.manifest.target.profile_provenance
    setup, profile = setup_of_run(run), shipped_profile(wanted or "")
    named: Mapping[str, object] = run.manifest.scenario.engine.to_json()
    if profile is None and named.get("profile"):  # the file that the scenario names
        with suppress(LmiBenchError, OSError, UnicodeDecodeError):
            profile = profile_from_json(Path(str(named["profile"])).read_text(encoding="utf-8"))
    if profile is None or profile.provenance != wanted or not run.manifest.target.is_simulated or setup is None:
        return {}
    profile = profile_for_run(profile, run)
    workload = run.manifest.scenario.workload
    is_drawn = not (workload.input_tokens and workload.output_tokens)
    found = {}
    for line in lines:
        with suppress(LmiBenchError):
            cell = replace(
                cell_of_summary(run.path, line, setup),
                replicas=run.manifest.target.replicas,
                length_spread=LENGTH_SPREAD if is_drawn else 0.0,
            )
            found[id(line)] = Uncertainty.of(profile, cell, spread=is_drawn)
    return found


def setup_of_run(run: Run) -> Setup | None:
    """The model on the devices of one replica, as the manifest states it; None if it does not."""
    facts, engine = run.manifest.target, run.manifest.scenario.engine
    if not (facts.instance and facts.dtype and facts.tensor_parallel):
        return None
    try:
        speculation = None
        if engine.draft is not None:
            draft = None if engine.draft == "ngram" else find_model(engine.draft)
            stated = engine.to_json().get("draft_acceptance") or 0.0
            speculation = Speculation(engine.draft_tokens, stated, draft)
        return Setup(
            find_model(run_model(run)),
            find_instance(facts.instance),
            facts.tensor_parallel,
            facts.dtype,
            kv_dtype=facts.kv_dtype,
            speculation=speculation,
        ).beside(facts.replicas)
    except LmiBenchError:
        return None
