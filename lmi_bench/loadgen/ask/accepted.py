"""Whether a server takes what is stated of it: a protocol, a model, prompts of token ids.

One short request says what every other one would be refused for, before a run is begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lmi_bench.core.errors import InputError
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.ask.probe import Probe, UnansweredError
from lmi_bench.loadgen.ask.two_tokens import (
    OLD_LENGTH,
    REFUSED_FIELDS,
    WANTS_KEY,
    ask_for_two,
    length_notes,
    wants_key,
)
from lmi_bench.wire.event import WireFormat
from lmi_bench.wire.format import find_format

TIMEOUT_S = 10.0
_MAY_PASS = (408, 409, 425)
"""Statuses of a client's mistake that the same request may not meet a second time."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """How a server takes requests of the protocol and model that were stated; as in `Discovery`."""

    forces_length: bool = True
    wire_format: WireFormat | None = None
    notes: tuple[str, ...] = ()


def accepts(
    url: str,
    *,
    protocol: str,
    model: str,
    stream: bool = True,
    ignore_eos: bool = True,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[str], None] = lambda _: None,
) -> Accepted:
    """Ask a server whose protocol and model are stated for two tokens.

    Raises InputError where nothing answers, or where the server refuses for a reason that would
    hold for every other request: its key, its model, its path. What may pass (an error of the
    server, overload, an answer that is slow or without an end) is left to be measured.
    """
    probe = Probe(url, headers or {}, timeout_s=timeout_s, tell=tell)
    try:
        wire_format, reply, forced = ask_for_two(
            probe,
            find_format(protocol, stream=stream),
            model,
            stream=stream,
            ignore_eos=ignore_eos,
            whole=False,
        )
    except UnansweredError:
        return Accepted()
    if reply.status in WANTS_KEY:
        raise wants_key(probe, wire_format, reply)
    error = wire_format.error(reply.status, reply.body)
    mistaken = error.kind == "client_error" and reply.status not in _MAY_PASS
    if mistaken or 300 <= reply.status < 400:
        said = redact_text(str(error), probe.keys).rstrip(".")
        known = _known_models(probe)
        others = f" (it has {', '.join(known)})" if known and model not in known else ""
        raise InputError(
            f"{probe.url} refuses protocol {protocol} with model {model!r}{others}: {said}. Leave "
            "--protocol and --model out to have them found"
        )
    return Accepted(
        forces_length=forced and protocol != "tgi",
        wire_format=wire_format if wire_format is OLD_LENGTH else None,
        notes=length_notes(wire_format),
    )


def takes_token_ids(
    url: str,
    *,
    model: str,
    stream: bool = True,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    tell: Callable[[str], None] = lambda _: None,
) -> bool:
    """Whether `/v1/completions` takes a prompt of token ids, by asking for one token.

    False only where the same request with a text is answered: what refuses both, or answers
    neither, says why when it is measured. Raises InputError where nothing answers.
    """
    probe = Probe(url, headers or {}, timeout_s=timeout_s, tell=tell)
    wire_format = find_format("openai", stream=stream)
    text = PlannedRequest(
        0, 0.0, input_tokens=1, output_tokens=1, prompt_text="Hello", ignore_eos=False
    )

    def status(request: PlannedRequest) -> int:
        body = wire_format.request_body(request, model=model, stream=stream)
        return probe.post(wire_format, body, whole=False).status

    try:
        if status(replace(text, prompt_token_ids=(1,))) not in (*REFUSED_FIELDS, 500):
            return True
        return not 200 <= status(text) < 300
    except UnansweredError:
        return True


def _known_models(probe: Probe) -> list[str]:
    """Names that the server lists, five at most."""
    entries = probe.get("/v1/models").json_object().get("data")
    entries = entries if isinstance(entries, list) else []
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry][:5]
