"""Engine settings that were stated and change nothing: named, since silence reads as an effect."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_bench.core.scenario import EngineSection

_DYNAMIC = ("batch_size", "max_batch_delay_ms")
_ROLLING = ("max_rolling_batch_size", "chunked_prefill")
_SMOOTHQUANT = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel")
_CALIBRATED = ("awq", "awq-int4", "awq-int3", "smoothquant")
_DRAFTING = ("draft_tokens", "draft_adaptive", "draft_acceptance")
_COMPUTING = ("backend", "threads", "compile_shapes", "enforce_eager", "calibration")
_FACTS = ("tensor_parallel", "dtype")  # of a server: calibration on the run reads them


def idle_in_engine(settings: EngineSection) -> tuple[str, ...]:
    """A line that names them for the bundled engine; nothing where every setting counts."""
    on_gpu = settings.device == "cuda" or settings.backend == "triton"
    graphs = on_gpu and not settings.enforce_eager
    prepared = settings.compile or settings.artefact is not None or graphs
    return _line(
        settings,
        [
            *_for_every_engine(settings),
            (_SMOOTHQUANT, settings.quantize != "smoothquant", "for quantize smoothquant"),
            (("calibration",), settings.quantize not in _CALIBRATED, "for awq and smoothquant"),
            (("compile_shapes",), not prepared, "for compile"),
            (("enforce_eager",), not on_gpu, "for graphs on a GPU"),
            (("memory_share",), settings.num_blocks is not None, "num_blocks is stated"),
            (("profile",), True, "for a simulated engine"),
        ],
    )


def idle_in_simulation(settings: EngineSection) -> tuple[str, ...]:
    """As `idle_in_engine`, for an engine that computes nothing."""
    return _line(
        settings,
        [
            *_for_every_engine(settings),
            ((*_COMPUTING, *_SMOOTHQUANT), True, "nothing is computed"),
        ],
    )


def idle_at_endpoint(settings: EngineSection) -> tuple[str, ...]:
    """As `idle_in_engine`, for a server elsewhere, which keeps all its own settings."""
    own = tuple(name for name in EngineSection.model_fields if name not in _FACTS)
    return _line(settings, [(own, True, "the server has its own")])


_Idle = tuple[tuple[str, ...], bool, str]


def _for_every_engine(settings: EngineSection) -> list[_Idle]:
    policy = settings.policy
    return [
        (_DYNAMIC, policy != "dynamic", "for policy dynamic"),
        (_ROLLING, policy != "rolling", "for policy rolling"),
        (("router",), settings.replicas == 1, "for several replicas"),
        (_DRAFTING, settings.draft is None, "for a draft"),
    ]


def _line(settings: EngineSection, cases: Sequence[_Idle]) -> tuple[str, ...]:
    """cases  names of settings, whether they are idle, and what they are for"""
    found = []
    for names, idle, words in cases:
        stated = [name for name in names if idle and _differs(settings, name)]
        if stated:
            found.append(f"{', '.join(stated)} ({words})")
    return (f"engine settings without effect here: {'; '.join(found)}",) if found else ()


def _differs(settings: EngineSection, name: str) -> bool:
    """Whether a setting was given another value than the one that it has anyway."""
    return bool(getattr(settings, name) != EngineSection.model_fields[name].default)
