"""Benchmark LLM endpoints and plan their capacity: the library's face, loaded when it is used.

`import lmi_bench` loads no other module. See docs/library.md.
"""

from importlib import import_module

__version__ = "0.1.0"

_FACE = {
    **dict.fromkeys(("sweep", "predict", "recommend", "write_report"), "jobs.face"),
    "SweepSettings": "jobs.settings.sweep",
    "SweepResult": "jobs.sweep.result",
    "PredictSettings": "jobs.settings.plan",
    "Prediction": "jobs.predict",
    "RecommendSettings": "jobs.settings.recommend",
    "Advice": "jobs.recommend",
    "ReportSettings": "jobs.settings.results",
    "WrittenReport": "jobs.results",
    **dict.fromkeys(("Listener", "Silent"), "core.listener"),
    **dict.fromkeys(("LmiBenchError", "InputError"), "core.errors"),
}

__all__ = ["__version__", *_FACE]


def __getattr__(name: str) -> object:
    """A function or type of the face, from the module that has it."""
    if name not in _FACE:
        raise AttributeError(f"module 'lmi_bench' has no attribute {name!r}")
    return getattr(import_module(f"lmi_bench.{_FACE[name]}"), name)


def __dir__() -> list[str]:
    """What the module offers."""
    return sorted({*globals(), *_FACE})
