"""What a server accepts: its protocol, its model and its limits, by test requests before a run.

One request for two tokens shows whether a protocol is served, and by which field a server obeys a
requested length. A request that the server would refuse every time is reported before the run.

For a server of which nothing is stated, a few GETs with short time-outs suggest its kind (`/info`
of TGI, `/v1/models` of OpenAI-compatible servers, `/ping` of a SageMaker container). The request
then confirms a protocol, and shows whether the server reports token counts and obeys a length.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.ask.probe import EndlessError, Probe, Reply, UnansweredError
from lmi_bench.wire.event import WireEvent, WireFormat
from lmi_bench.wire.format import DISCOVERED, UNFORCED, find_format
from lmi_bench.wire.openai import OpenAiChatFormat
from lmi_bench.wire.responses import LEAST_TOKENS, ResponsesFormat

REFUSED_FIELDS: Final = (400, 422, 424)  # statuses of a server that rejects an unknown field
_WANTS_KEY: Final = (401, 403)
OLD_LENGTH: Final = OpenAiChatFormat(length_field="max_tokens")
_ASKED_TOKENS, _TOO_MANY_TOKENS = 2, 5


def ask_for_two(
    probe: Probe, wire_format: WireFormat, model: str, *, stream: bool, ignore_eos: bool = True, whole: bool = True
) -> tuple[WireFormat, Reply, bool]:
    """Request two tokens; gives the format that the server obeys, its reply, and whether the
    length was forced.

    A chat server may know only the older field for the length. It then answers with more tokens
    than requested, so its answer is always read.

    whole  False: do not wait for the body
    """
    chat = isinstance(wire_format, OpenAiChatFormat)
    least = LEAST_TOKENS if isinstance(wire_format, ResponsesFormat) else _ASKED_TOKENS
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
    if wire_format is not OLD_LENGTH:
        return ()
    return ("the server ignores max_completion_tokens: lengths are requested as max_tokens",)


def check_key(probe: Probe, wire_format: WireFormat, reply: Reply) -> None:
    """Raise InputError for a request that got 401 or 403."""
    if reply.status not in _WANTS_KEY:
        return
    said = redact_text(str(wire_format.error(reply.status, reply.body)), probe.keys)
    if probe.keys:
        raise InputError(
            f"{probe.url} refuses the key that it is given ({said}): give another with --api-key, or -H 'Name: value'"
        )
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


def accepts(probe: Probe, stream: bool = True, *, protocol: str, model: str, ignore_eos: bool = True) -> Accepted:
    """Request two tokens from a server whose protocol and model are stated.

    Raises InputError if nothing answers, or if the server would refuse every other request too
    (key, model, path). Failures that may be temporary (a server error, overload, a slow or endless
    answer) are left to the measurement.
    """
    try:
        wire_format, reply, forced = ask_for_two(
            probe, find_format(protocol, stream=stream), model, stream=stream, ignore_eos=ignore_eos, whole=False
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


_SUFFIXES: Final = {row["path_end"]: row["protocols"].split() for row in read_rows("protocol_paths.csv", "loadgen")}
"""Protocols by the end of a path; `/invocations` may be any container's."""
_NOT_THIS_PATH = (404, 405, 501)
_TGI_ROUTER: Final = "text-generation-router"
_UNNAMED: Final = "an OpenAI-compatible server"
_VERSION_ROUTES: Final = {"vllm": "/version", "sglang": "/server_info"}
_NO_NAMES: Final = ("", "me")  # llama-cpp-python is "me"
_CONTEXT_KEYS = ("max_model_len", "context_length", "max_context_length", "n_ctx", "n_ctx_train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery(Accepted):
    """Protocol, model and limits of a server, and how it handles requests.

    server         name of the server, for display
    tokenizer      another place of the model's tokenizer, beside its name
    max_model_len  maximum tokens of a request, input and output; None: unknown
    states_counts  whether answers contain the server's own token counts
    """

    protocol: str
    model: str
    server: str
    tokenizer: str | None = None
    max_model_len: int | None = None
    states_counts: bool = False

    def token_source(self, *, tokenizer: bool) -> str:
        """Source of token counts: server, tokenizer (this model's, if available here) or chunks."""
        return "server" if self.states_counts else "tokenizer" if tokenizer else "chunks"

    def describe(self, *, tokenizer: bool = False) -> str:
        """One line for people.

        tokenizer  whether the model's is available here
        """
        limit = "" if self.max_model_len is None else f", context {self.max_model_len:,} tokens"
        sources = {
            "server": "the server's own",
            "tokenizer": "the model's tokenizer, since the server states none",
            "chunks": "chunks, since it states none",
        }
        source = sources[self.token_source(tokenizer=tokenizer)]
        return f"found {self.server}: protocol {self.protocol}, model {self.model}{limit}; token counts: {source}"


@dataclass(frozen=True, slots=True)
class _Hints:
    """Results of the GETs: the likely server, and the protocols to try."""

    server: str = ""
    protocols: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    tokenizer: str | None = None
    max_model_len: int | None = None


def discover(probe: Probe, *, protocol: str | None = None, model: str | None = None, stream: bool = True) -> Discovery:
    """Find out what answers; keeps a given protocol or model.

    Raises InputError if nothing answers, a key is needed, or no protocol fits.
    """
    hints = _ask(probe)
    name = model if model is not None else next(iter(hints.models), "model")
    if hints.models and name not in hints.models:
        known = ", ".join(hints.models[:5])
        raise InputError(f"{probe.url} has no model {name!r}: it has {known}")
    notes: tuple[str, ...] = ()
    if model is None and len(hints.models) > 1:
        notes = (f"{len(hints.models)} models are served; {name} is measured (--model names one)",)
    tried: dict[str, list[str]] = {}  # protocols by the reason why they do not fit
    by_path = next((names for end, names in _SUFFIXES.items() if probe.path.endswith(end)), ())
    likely = dict.fromkeys(by_path or (*hints.protocols, *DISCOVERED))
    for candidate in likely if protocol is None else (protocol,):
        wire_format, reply, forced = ask_for_two(probe, find_format(candidate, stream=stream), name, stream=stream)
        check_key(probe, wire_format, reply)
        try:
            events = _answer(wire_format, reply, stream=stream)
        except TargetError as exc:
            tried.setdefault(str(exc), []).append(candidate)
            continue
        return Discovery(
            protocol=candidate,
            model=name,
            server=hints.server or probe.authority,
            tokenizer=hints.tokenizer,
            max_model_len=hints.max_model_len,
            states_counts=any(event.output_tokens is not None for event in events),
            forces_length=forced and candidate not in UNFORCED,
            notes=notes + length_notes(wire_format) + _end_notes(candidate, events, stream=stream),
            wire_format=wire_format if wire_format is OLD_LENGTH else None,
        )
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in tried.items())
    raise InputError(
        f"{probe.url} answers, but in no protocol known here ({reasons}). Is "
        "the address right? The whole path of the API, such as "
        "http://host:8000/v1/chat/completions, or --protocol says what to ask"
    )


def _ask(probe: Probe) -> _Hints:
    """The server's description of itself; TGI first, because it has `/v1/models` too. Another
    server with TGI's routes names itself in `router`; its other protocols can force a length."""
    info = probe.get("/info").json_object()
    tgi = None
    if "model_id" in info and ("max_total_tokens" in info or "max_input_tokens" in info):
        tgi = _Hints(
            server=f"TGI {info.get('version', '')}".strip(),
            protocols=("tgi",),
            models=(str(info["model_id"]),),
            max_model_len=_positive(info.get("max_total_tokens")),
        )
        if info.get("router", _TGI_ROUTER) == _TGI_ROUTER:
            return tgi
    reply = probe.get("/v1/models")
    entries = reply.json_object().get("data")
    if isinstance(entries, list) and entries and isinstance(entries[0], dict):
        hints = _from_models([entry for entry in entries if isinstance(entry, dict)])
        route = _VERSION_ROUTES.get(hints.server)
        version = None if route is None else probe.get(route).json_object().get("version")
        return replace(hints, server=f"{hints.server} {str(version)[:40]}") if version else hints
    check_key(probe, find_format("openai"), reply)
    if tgi is not None:
        return tgi
    if probe.get("/ping").status == 200:
        return _Hints(server="a SageMaker container (LMI)", protocols=("lmi",))
    return _Hints()


def _from_models(entries: Sequence[Mapping[str, Any]]) -> _Hints:
    first = entries[0]
    places = [first, first.get("meta") if isinstance(first.get("meta"), dict) else {}]
    limits = [place.get(key) for place in places if place for key in _CONTEXT_KEYS]
    owner = str(first.get("owned_by") or "")
    root = first.get("root")
    return _Hints(
        server=owner if owner not in _NO_NAMES and len(owner) < 40 else _UNNAMED,
        protocols=("openai", "openai-chat"),
        models=tuple(str(entry["id"]) for entry in entries if "id" in entry),
        tokenizer=root if isinstance(root, str) else None,
        max_model_len=next((limit for limit in map(_positive, limits) if limit), None),
    )


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _end_notes(protocol: str, events: Sequence[WireEvent], *, stream: bool) -> tuple[str, ...]:
    """A note if a truncated answer could not be distinguished from a complete one."""
    says_why = any(event.finish_reason is not None for event in events)
    if says_why or not stream or not protocol.startswith("openai"):
        return ()
    return ("warning: answers end without a finish_reason: a truncated one looks complete",)


def _answer(wire_format: WireFormat, reply: Reply, *, stream: bool) -> list[WireEvent]:
    """The events of a reply; raises TargetError if it is no answer of this protocol."""
    if reply.status in _NOT_THIS_PATH:
        raise TargetError("client_error", f"HTTP {reply.status}")
    if not 200 <= reply.status < 300:
        raise wire_format.error(reply.status, reply.body)
    if reply.content_type == "text/html":
        start = reply.body[:80].decode(errors="replace")
        raise TargetError("malformed_frame", f"a web page: {start!r}")
    events = list(events_of(wire_format, reply, stream=stream))
    for event in events:
        if event.error is not None:
            raise TargetError("server_error", event.error)
    if not any(each.num_tokens or each.finish_reason or each.tokenless for each in events):
        raise TargetError("short_output", "the answer holds no token")
    return events
