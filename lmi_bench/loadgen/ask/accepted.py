"""Test requests before a run: whether a server accepts the protocol, the model and the length.

One request for two tokens shows whether a protocol is served, and by which field a server obeys a
requested length. A request that the server would refuse every time is reported before the run.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.texts import say
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.ask.probe import EndlessError, Probe, Reply, UnansweredError
from lmi_bench.wire.event import WireEvent, WireFormat
from lmi_bench.wire.format import UNFORCED, find_format
from lmi_bench.wire.openai import LEAST_TOKENS, OpenAiChatFormat, OpenAiResponsesFormat

REFUSED_FIELDS: Final = (400, 422, 424)  # statuses of a server that rejects an unknown field
_WANTS_KEY: Final = (401, 403)
OLD_LENGTH: Final = OpenAiChatFormat(length_field="max_tokens")
_OLD_LENGTH_NOTE: Final = (
    "the server ignores max_completion_tokens: lengths are requested as max_tokens"
)
_ASKED_TOKENS, _TOO_MANY_TOKENS = 2, 5


def ask_for_two(
    probe: Probe,
    wire_format: WireFormat,
    model: str,
    *,
    stream: bool,
    ignore_eos: bool = True,
    whole: bool = True,
) -> tuple[WireFormat, Reply, bool]:
    """Request two tokens; gives the format that the server obeys, its reply, and whether the
    length was forced.

    A chat server may know only the older field for the length. It then answers with more tokens
    than requested, so its answer is always read.

    whole  False: do not wait for the body
    """
    chat = isinstance(wire_format, OpenAiChatFormat)
    least = LEAST_TOKENS if isinstance(wire_format, OpenAiResponsesFormat) else _ASKED_TOKENS
    request = PlannedRequest(*(0, 0.0, 1, least), prompt_text="Hello", ignore_eos=ignore_eos)

    def generate(form: WireFormat) -> tuple[WireFormat, Reply, bool]:
        """One request; repeated without `ignore_eos` if the server may refuse that field."""

        def post(planned: PlannedRequest) -> Reply:
            body = form.request_body(planned, model=model, stream=stream)
            return probe.post(form, body, whole=whole or chat)

        reply = post(request)
        if reply.status not in REFUSED_FIELDS or not ignore_eos:
            return form, reply, ignore_eos
        again = post(replace(request, ignore_eos=False))
        return (form, again, False) if 200 <= again.status < 300 else (form, reply, True)

    if not chat:
        return generate(wire_format)
    usual: tuple[WireFormat, Reply, bool] | EndlessError
    try:
        usual = generate(wire_format)
        if not _is_too_long(wire_format, usual[1], stream=stream):
            return usual
    except EndlessError as exc:
        usual = exc
    with suppress(UnansweredError):
        older = generate(OLD_LENGTH)
        if 200 <= older[1].status < 300 and not _is_too_long(OLD_LENGTH, older[1], stream=stream):
            return older
    if isinstance(usual, EndlessError):
        raise usual
    return usual


def _is_too_long(wire_format: WireFormat, reply: Reply, *, stream: bool) -> bool:
    """Whether an answer has clearly more tokens than requested."""
    try:
        events = list(events_of(wire_format, reply, stream=stream))
    except TargetError:
        return False
    stated = max((event.output_tokens or 0 for event in events), default=0)
    return (stated or sum(event.num_tokens for event in events)) >= _TOO_MANY_TOKENS


def events_of(wire_format: WireFormat, reply: Reply, *, stream: bool) -> Iterator[WireEvent]:
    """The events of a reply. Raises TargetError if it is of another protocol."""
    kind = reply.content_type
    if not stream or kind == "application/json":
        yield wire_format.parse(reply.body)
        return
    splitter = wire_format.new_splitter()
    for payload in (*splitter.feed(reply.body), *splitter.close()):
        yield wire_format.parse(payload)


def length_notes(wire_format: WireFormat) -> tuple[str, ...]:
    return (_OLD_LENGTH_NOTE,) if wire_format is OLD_LENGTH else ()


def check_key(probe: Probe, wire_format: WireFormat, reply: Reply) -> None:
    """Raise InputError for a request that got 401 or 403."""
    if reply.status not in _WANTS_KEY:
        return
    said = redact_text(str(wire_format.error(reply.status, reply.body)), probe.keys)
    if probe.keys:
        raise InputError(say("key refused", probe=probe, said=said))
    raise InputError(f"{probe.url} wants a key ({said}): give --api-key, or -H 'Name: value'")


TIMEOUT_S = 10.0
"""Time-out of a probe for `accepts`, s."""
_MAY_PASS = (408, 409, 425)  # client error statuses that may be temporary


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """How a server handles requests of a protocol and a model.

    forces_length  whether it accepts `ignore_eos`
    wire_format    request format, if it is not the protocol's usual one
    """

    forces_length: bool = True
    wire_format: WireFormat | None = None
    notes: tuple[str, ...] = ()


def accepts(
    probe: Probe, stream: bool = True, *, protocol: str, model: str, ignore_eos: bool = True
) -> Accepted:
    """Request two tokens from a server whose protocol and model are stated.

    Raises InputError if nothing answers, or if the server would refuse every other request too
    (key, model, path). Failures that may be temporary (a server error, overload, a slow or endless
    answer) are left to the measurement.
    """
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
    check_key(probe, wire_format, reply)
    error = wire_format.error(reply.status, reply.body)
    mistaken = error.kind == "client_error" and reply.status not in _MAY_PASS
    if mistaken or 300 <= reply.status < 400:
        said = redact_text(str(error), probe.keys).rstrip(".")
        entries = probe.get("/v1/models").json_object().get("data")
        entries = entries if isinstance(entries, list) else []
        known = [str(each["id"]) for each in entries if isinstance(each, dict) and "id" in each][:5]
        others = f" (it has {', '.join(known)})" if known and model not in known else ""
        raise InputError(
            f"{probe.url} refuses protocol {protocol} with model {model!r}{others}: {said}. Leave "
            "--protocol and --model out to have them found"
        )
    return Accepted(
        forces_length=forced and protocol not in UNFORCED,
        wire_format=wire_format if wire_format is OLD_LENGTH else None,
        notes=length_notes(wire_format),
    )


def takes_token_ids(probe: Probe, *, model: str, stream: bool = True) -> bool:
    """Whether `/v1/completions` accepts a prompt of token ids; requests one token.

    False only if the same request with a text succeeds: other failures are reported by the
    measurement. Raises InputError if nothing answers.
    """
    wire_format = find_format("openai", stream=stream)
    text = PlannedRequest(*(0, 0.0, 1, 1), prompt_text="Hello", ignore_eos=False)

    def status(request: PlannedRequest) -> int:
        body = wire_format.request_body(request, model=model, stream=stream)
        return probe.post(wire_format, body, whole=False).status

    try:
        refused = status(replace(text, prompt_token_ids=(1,))) in (*REFUSED_FIELDS, 500)
        return not refused or not 200 <= status(text) < 300
    except UnansweredError:
        return True
