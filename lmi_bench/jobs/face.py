"""The jobs as functions with keywords, for use as a library; `import lmi_bench` offers them.

A job takes its settings as one value. Here the fields of that value are the keywords of a
function, so an option is declared once, and `help` lists it.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.option import Setting, default_note, filled, kinds, settings_of
from lmi_bench.jobs.settings.plan import PredictSettings
from lmi_bench.jobs.settings.recommend import RecommendSettings
from lmi_bench.jobs.settings.results import ReportSettings
from lmi_bench.jobs.settings.sweep import SweepSettings

if TYPE_CHECKING:
    from lmi_bench.jobs.predict import Prediction
    from lmi_bench.jobs.recommend import Advice
    from lmi_bench.jobs.results import WrittenReport
    from lmi_bench.jobs.sweep.result import SweepResult

R = TypeVar("R")
_WIDTH = 96
_LISTENER = "listener\n    `Listener` that gets notes, warnings and progress. (default: none)"


def _keywords(group: type[Any], *without: str) -> Callable[[Callable[[Any, Listener], R]], Callable[..., R]]:
    """The function with the fields of its settings class as keywords, listed in its help."""
    known = {each.name: each for each in settings_of(group) if each.name not in without}
    signature = inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.default is MISSING else each.default,
            )
            for each in known.values()
        ]
        + [inspect.Parameter("listener", inspect.Parameter.KEYWORD_ONLY, default=None)]
    )

    def with_keywords(job: Callable[[Any, Listener], R]) -> Callable[..., R]:
        @wraps(job)
        def call(*, listener: Listener | None = None, **given: Any) -> R:
            signature.bind(**given)  # raises TypeError as Python itself does
            values = {name: _as_kind(known[name].kind, value) for name, value in given.items()}
            return job(filled(group, values), listener or SILENT)

        vars(call)["__signature__"] = signature
        listed = "\n".join((*map(_described, known.values()), _LISTENER))
        for each in known.values():  # a help text names other options as they are typed
            name = each.option.name_of(each.name).partition("/")[0]
            listed = re.sub(rf"{name}(?![\w-])", f"`{each.name}`", listed)
        before, returns, after = inspect.cleandoc(job.__doc__ or "").partition("\nReturns ")
        call.__doc__ = f"{before}\nParameters, all by keyword:\n\n{listed}\n{returns}{after}"
        return call

    return with_keywords


def _described(setting: Setting) -> str:
    text = setting.option.help.replace("; repeatable.", "; a list.")
    text += default_note(setting.option, setting.default)
    if setting.default is MISSING:
        text += " (required)"
    body = textwrap.fill(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return f"{setting.name}\n{body}"


def _as_kind(kind: Any, value: Any) -> Any:
    """The value in the field's type: a text may be a path, one value a list, and a list the text
    of a comma list."""
    wanted = kinds(kind)
    tuples = [each for each in wanted if get_origin(each) is tuple]
    if tuples and value is not None:
        values = value if isinstance(value, list | tuple) else (value,)
        return tuple(_as_kind(get_args(tuples[0])[0], each) for each in values)
    if Path in wanted and isinstance(value, str):
        return Path(value)
    if str in wanted and isinstance(value, list | tuple | int | float):
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return value


@_keywords(SweepSettings, "matrix", "against")
def sweep(settings: SweepSettings, listener: Listener) -> "SweepResult":
    """Measure a target over concurrency or request rate, and write a run folder.

    Keywords override the scenario file, which overrides the defaults. The sweep runs an asyncio
    loop of its own, so call it from a thread without a running loop.

    Returns a SweepResult: `folder` is the run folder, `levels` has a Level each (latencies in ms,
    other times in s), `knees` the knee by each rule, and `answer` that of a search. `failed` and
    `slo_missed` say how it ended.

    Raises InputError before anything is written, for settings that cannot be used together or a
    target that cannot be opened.

    Example:

        result = lmi_bench.sweep(
            target="sim:ml.g5.2xlarge", model="llama-2-7b", concurrency=[1, 8, 64], out="runs/a"
        )
        for level in result.levels:
            print(level.load.name, level.throughput_tokens_per_s, level.latency["ttft"].p90)
    """
    from lmi_bench.jobs.sweep.run import sweep as job

    return job(settings, listener)


@_keywords(PredictSettings)
def predict(settings: PredictSettings, listener: Listener) -> "Prediction":
    """Predict throughput and latency of a model on a machine, with 80 % intervals.

    Equal requests are predicted in closed form. Unequal ones (`mix`, `input_lengths`, `trace` ...)
    are simulated with the bundled engine's scheduler.

    Returns a Prediction: `forecasts` of equal requests, one for each load, or `simulated`; its
    `to_json()` has all figures by name, times in ms and rates in tokens/s.

    Raises InputError for an unknown model or instance, for a model that does not fit, and for
    values that exclude each other.

    Example:

        prediction = lmi_bench.predict(
            model="llama-2-7b", instance="ml.g5.2xlarge", input_tokens=256, output_tokens=256,
            concurrency=[1, 8, 64],
        )
        for load in prediction.forecasts:
            print(load.cell.concurrency, load.figures["ttft_ms"].value)
    """
    from lmi_bench.jobs.predict import predict as job

    return job(settings, listener)


@_keywords(RecommendSettings, "portfolio")
def recommend(settings: RecommendSettings, listener: Listener) -> "Advice":
    """Rank instances, tensor-parallel degrees and replicas for a model under SLOs.

    Without a load the answer is one machine, loaded up to the limits. With `runs`, their levels
    calibrate the step-time model first.

    Returns an Advice: `answer.recommended` is the best candidate, or None if none keeps the SLOs
    and `answer.nearest` is the closest; `answer.candidates` has all, the best first. Its
    `to_json()` is what `recommend --json` writes.

    Raises InputError for a question that cannot be answered, such as an unknown instance.

    Example:

        advice = lmi_bench.recommend(
            model="llama-2-7b", input_tokens=256, output_tokens=256, rate=2, slo="ttft_p90<=1s",
            instance=["ml.g5.2xlarge", "ml.g5.12xlarge"],
        )
        best = advice.answer.recommended
        if best is not None:
            print(best.instances, best.instance)
    """
    from lmi_bench.jobs.recommend import recommend as job

    return job(settings, listener)


@_keywords(ReportSettings)
def write_report(settings: ReportSettings, _: Listener) -> "WrittenReport":
    """Write one HTML page with the curves, knees and levels of runs, and with recommendations.

    Returns the paths of the files that were written: `html`, `markdown` and `figures`.

    Raises InputError for a run or a recommendation that cannot be read.

    Example:

        lmi_bench.write_report(runs=["runs/a", "runs/b"], label=["A", "B"], out="report.html")
    """
    from lmi_bench.jobs.results import report as job

    return job(settings)
