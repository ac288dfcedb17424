"""Writes a Chrome trace of the engine: its steps, and each request's queue and phase times.

Opens in chrome://tracing or ui.perfetto.dev. Events are written immediately, one per line, as a
JSON array whose closing bracket is optional, so that a killed run's trace is readable. Times are
microseconds on the engine's clock since the first event.
"""

from collections import Counter
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import orjson

from lmi_bench.core.errors import InputError
from lmi_bench.engine.async_engine import Generation
from lmi_bench.engine.scheduling.batch import StepBatch

_STEPS: Final = 1  # "processes" of the trace
_REQUESTS: Final = 2


class ChromeTrace(AbstractContextManager["ChromeTrace"]):
    """Writes one trace file; a context manager that ends it. AsyncEngine calls `on_step` and
    `on_end`. Raises InputError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as exc:
            raise InputError(f"--step-trace: cannot write {path}: {exc.strerror}") from exc
        self._start_s: float | None = None
        self._file.write(b"[\n")
        for process, name in ((_STEPS, "engine steps"), (_REQUESTS, "requests")):
            self._write({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})

    def __exit__(self, *_: object) -> None:
        self._file.write(b"{}]\n")  # an empty event: every other line ends with a comma
        self._file.close()

    def on_step(self, batch: StepBatch, start_s: float, end_s: float) -> None:
        """Write a step: its kinds of rows, and its sequences, tokens and draft tokens."""
        shape = batch.shape
        kinds = Counter(str(entry.kind) for entry in batch.entries)
        args = {
            "step": batch.step_id,
            **kinds,
            "prefill_tokens": shape.prefill_tokens,
            "decode_tokens": shape.decode_tokens,
            "context_tokens": shape.decode_context_tokens,
            "drafted_tokens": shape.decode_tokens - shape.decode_sequences,
            "sequences": [entry.seq_id for entry in batch.entries],
        }
        self._span("+".join(sorted(kinds)), (_STEPS, 0), (start_s, end_s), args)

    def on_end(self, generation: Generation) -> None:
        """Write an ended request: its times in queue, prefill and decode."""
        tokens = sum(len(event.token_ids) for event in generation.events)
        args = {
            "tokens": tokens,
            "finish_reason": generation.finish_reason,
            "drafted_tokens": generation.drafted_tokens,
            "accepted_tokens": generation.accepted_tokens,
        }
        begun_s = (generation.submitted_s, generation.first_scheduled_s, generation.first_token_s)
        end_s = generation.finished_s
        phases = zip(("queue", "prefill", "decode"), pairwise((*begun_s, end_s)), strict=True)
        for name, (start_s, stop_s) in phases:
            stop_s = end_s if stop_s is None else stop_s  # it ended in this phase
            if start_s is not None and stop_s is not None:
                self._span(name, (_REQUESTS, generation.seq_id), (start_s, stop_s), args)

    def _span(self, name: str, line: tuple[int, int], ends_s: tuple[float, float], args: dict[str, Any]) -> None:
        """line  process and thread of the trace"""
        start_s, end_s = ends_s
        if self._start_s is None:
            self._start_s = start_s
        self._write(
            {
                "ph": "X",
                "name": name,
                "pid": line[0],
                "tid": line[1],
                "ts": round((start_s - self._start_s) * 1e6, 3),
                "dur": round((end_s - start_s) * 1e6, 3),
                "args": args,
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(event) + b",\n")
