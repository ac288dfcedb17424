"""Discovery of a server's protocol, model and limits.

A few GETs with short time-outs suggest the kind of server (`/info` of TGI, `/v1/models` of
OpenAI-compatible servers, `/ping` of a SageMaker container). One request for two tokens then
confirms a protocol, and shows whether the server reports token counts and obeys a forced length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.texts import say
from lmi_bench.loadgen.ask import accepted
from lmi_bench.loadgen.ask.probe import Probe, Reply
from lmi_bench.wire.event import WireEvent, WireFormat
from lmi_bench.wire.format import DISCOVERED, UNFORCED, find_format

_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("openai-chat",),
    "/v1/completions": ("openai",),
    "/generate_stream": ("tgi",),
    "/generate": ("tgi",),
    "/invocations": ("lmi", "openai", "openai-chat"),
    "/v1": ("openai", "openai-chat"),
}
"""Protocols by the end of a path; `/invocations` may be any container's."""
_NOT_THIS_PATH = (404, 405, 501)
_TGI_ROUTER: Final = "text-generation-router"
_UNNAMED: Final = "an OpenAI-compatible server"
_VERSION_ROUTES: Final = {"vllm": "/version", "sglang": "/server_info"}
_NO_NAMES: Final = ("", "me")  # llama-cpp-python is "me"
_CONTEXT_KEYS = ("max_model_len", "context_length", "max_context_length", "n_ctx", "n_ctx_train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery(accepted.Accepted):
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
        return say("discovery", self=self, limit=limit, source=source)


@dataclass(frozen=True, slots=True)
class _Hints:
    """Results of the GETs: the likely server, and the protocols to try."""

    server: str = ""
    protocols: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    tokenizer: str | None = None
    max_model_len: int | None = None


def discover(
    probe: Probe, *, protocol: str | None = None, model: str | None = None, stream: bool = True
) -> Discovery:
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
    tried: list[tuple[str, str]] = []
    for candidate in _candidates(protocol, probe.path, hints):
        wire_format, reply, forced = accepted.ask_for_two(
            probe, find_format(candidate, stream=stream), name, stream=stream
        )
        accepted.check_key(probe, wire_format, reply)
        try:
            events = _answer(wire_format, reply, stream=stream)
        except TargetError as exc:
            tried.append((candidate, str(exc)))
            continue
        return Discovery(
            protocol=candidate,
            model=name,
            server=hints.server or probe.authority,
            tokenizer=hints.tokenizer,
            max_model_len=hints.max_model_len,
            states_counts=any(event.output_tokens is not None for event in events),
            forces_length=forced and candidate not in UNFORCED,
            notes=notes
            + accepted.length_notes(wire_format)
            + _end_notes(candidate, events, stream=stream),
            wire_format=wire_format if wire_format is accepted.OLD_LENGTH else None,
        )
    raise InputError(say("no protocol", probe=probe, reasons=_by_reason(tried)))


def _by_reason(tried: Sequence[tuple[str, str]]) -> str:
    """Why each protocol did not fit, grouped by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in tried:
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(group)}: {reason}" for reason, group in names.items())


def _candidates(protocol: str | None, path: str, hints: _Hints) -> list[str]:
    """Protocols to try, most likely first."""
    if protocol is not None:
        return [protocol]
    by_path = next((names for end, names in _SUFFIXES.items() if path.endswith(end)), ())
    return list(dict.fromkeys(by_path or (*hints.protocols, *DISCOVERED)))


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
    accepted.check_key(probe, find_format("openai"), reply)
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
    events = list(accepted.events_of(wire_format, reply, stream=stream))
    for event in events:
        if event.error is not None:
            raise TargetError("server_error", event.error)
    if not any(each.num_tokens or each.finish_reason or each.tokenless for each in events):
        raise TargetError("short_output", "the answer holds no token")
    return events
