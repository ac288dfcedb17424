"""The jobs as functions with keywords, for use as a library; `import lmi_bench` offers them.

A job takes its settings as one value. Here the fields of that value are the keywords of a
function, so an option is declared once, and `help` lists it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.option import Setting, filled, kinds, settings_of
from lmi_bench.jobs.settings.predict import PredictSettings
from lmi_bench.jobs.settings.report import ReportSettings

if TYPE_CHECKING:
    from lmi_bench.jobs.predict import Prediction
    from lmi_bench.jobs.report import WrittenReport

R = TypeVar("R")
_WIDTH = 96
_PARAMETERS = "PARAMETERS"
_LISTENER = "listener\n    `Listener` that is told notes, warnings and progress. (default: none is)"


def _keywords(group: type[Any]) -> Callable[[Callable[[Any, Listener], R]], Callable[..., R]]:
    """The function with the fields of its settings class as keywords, and listed in its help."""
    known = {each.name: each for each in settings_of(group)}
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
        call.__doc__ = inspect.cleandoc(job.__doc__ or "").replace(_PARAMETERS, listed)
        return call

    return with_keywords


def _described(setting: Setting) -> str:
    """A keyword's entry of the help."""
    text = setting.option.help.replace("; repeatable.", "; a list.")
    if setting.default is MISSING:
        text += " (required)"
    elif setting.option.default is not None or setting.default not in (None, (), ""):
        text += f" (default: {setting.option.default or setting.default})"
    body = textwrap.fill(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return f"{setting.name}\n{body}"


def _as_kind(kind: Any, value: Any) -> Any:
    """The value as the field has it, for a caller who gives a text for a path, one value for a
    list of one, or a list where the command line takes values between commas."""
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


@_keywords(PredictSettings)
def predict(settings: PredictSettings, listener: Listener) -> Prediction:
    """Predict throughput and latency of a model on a machine, with 80 % intervals.

    Equal requests are predicted in closed form. Unequal ones (`mix`, `input_lengths`, `trace` ...)
    are simulated over the bundled engine's scheduler.

    Parameters, all by keyword:

    PARAMETERS

    Returns a Prediction: `forecasts` of equal requests, one for each load, or `simulated`; its
    `to_json()` has all figures by name, times in ms and rates in tokens/s.

    Raises InputError for a model or an instance that is not known, for one that does not fit, and
    for values that exclude each other.

    Example:

        prediction = lmi_bench.predict(
            model="llama-2-7b",
            instance="ml.g5.2xlarge",
            input_tokens=256,
            output_tokens=256,
            concurrency=[1, 8, 64],
        )
        for load in prediction.forecasts:
            print(load.cell.concurrency, load.figures["ttft_ms"].value)
    """
    from lmi_bench.jobs.predict import predict as job

    return job(settings, listener)


@_keywords(ReportSettings)
def write_report(settings: ReportSettings, _: Listener) -> WrittenReport:
    """Write one HTML page with the curves, knees and levels of runs, and with recommendations.

    Parameters, all by keyword:

    PARAMETERS

    Returns the paths of the files that were written: `html`, `markdown` and `figures`.

    Raises InputError for a run or a recommendation that cannot be read.

    Example:

        lmi_bench.write_report(runs=["runs/a", "runs/b"], label=["A", "B"], out="report.html")
    """
    from lmi_bench.jobs.report import report as job

    return job(settings)
