"""Opens a server at a URL: its protocol and model are found by asking it if not stated."""

import contextlib
import functools
import socket
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Listener
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.scenario import AUTO, Scenario
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.loadgen.ask import discover
from lmi_bench.loadgen.ask.probe import Probe
from lmi_bench.loadgen.http.endpoint import Endpoint, parse_endpoint
from lmi_bench.loadgen.http.native_harvest import choose_receive
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import SPACING_S, HttpTarget
from lmi_bench.loadgen.http.tls import NOT_CHECKED, client_context
from lmi_bench.loadgen.prompts.prompts import ExactText, PromptText, TextCounter, common_words
from lmi_bench.loadgen.run.retry import RetryingTarget
from lmi_bench.targets.applies import idle_in_engine, kind_of
from lmi_bench.targets.bench import Access, Bench, Main
from lmi_bench.targets.prompts import find_tokenizer, longest_request, make_prompts
from lmi_bench.wire.format import find_format
from lmi_bench.wire.openai import OpenAiChatFormat, OpenAiCompletionsFormat

_FITTED = (
    "the default workload exceeds the server's context: {} tokens in and {} out instead "
    "(--input-tokens, --output-tokens)"
)
_INEXACT_SHARE = 0.4  # of the context, for prompts that a template or a tokenizer may lengthen
_NOT_FORCED = "warning: the server cannot be made to ignore the end of the text, so answers may be shorter than planned"


def http_bench(scenario: Scenario, access: Access, listener: Listener) -> Bench:
    """A URL; what the scenario leaves open is found by asking the server. Raises InputError if no
    known protocol is answered, or the workload does not fit."""
    headers = access.all_headers(scenario.protocol)
    probe = open_probe(scenario, headers, listener)
    if access.asked is None:
        scenario, asked, found, notes = _ask(scenario, probe)
    else:
        asked, found, notes = access.asked, None, ()
    tokenizer = _first_tokenizer((scenario.model, asked["tokenizer"]))
    wire_format = find_format(scenario.protocol, stream=scenario.stream)
    if asked["format"]:
        wire_format = type(wire_format)(**asked["format"])
    facts: dict[str, Any] = {
        "kind": "http",
        "url": scenario.target,
        "protocol": scenario.protocol,
        "model": scenario.model,
        "headers": sorted(headers),
    }
    if found is not None:
        facts |= {
            "server": found.server,
            "max_model_len": found.max_model_len,
            "token_counts": found.token_source(tokenizer=tokenizer is not None),
        }
    before_level = None
    if scenario.client.reset_prefix_cache and access.asked is None:
        probe.reset_prefix_cache()  # a server that cannot is reported before the sweep
        before_level = probe.reset_prefix_cache
    parts = urllib.parse.urlsplit(scenario.target)
    host = parts.netloc.rpartition("@")[2]
    return endpoint_bench(
        *(scenario, scenario.target, listener),
        functools.partial(
            HttpTarget,
            scenario.target,
            wire_format,
            headers=headers,
            count_tokens=None if tokenizer is None else TextCounter(tokenizer),
        ),
        title=f"{redact_text(scenario.target)}, {scenario.protocol}, {scenario.model}",
        facts=facts,
        tokenizer=tokenizer,
        notes=notes,
        secrets=access.secrets(),
        metrics_url=urllib.parse.urlunsplit((parts.scheme, host, "/metrics", "", "")),
        metrics_headers=headers,
        tls_context=probe.context,
        asked=asked,
        before_level=before_level,
    )


def open_probe(scenario: Scenario, headers: Mapping[str, str], listener: Listener) -> Probe:
    """Sends single requests to the scenario's URL, with its headers and certificates."""
    client, context = scenario.client, None
    if scenario.target.lower().startswith("https:"):
        context = client_context(client.cacert, insecure=client.insecure)
    timeout_s = 60.0 if AUTO in (scenario.protocol, scenario.model) else discover.TIMEOUT_S
    url, tell = scenario.target, listener.note
    return Probe(url, headers, timeout_s=timeout_s, tell=tell, context=context)


def _ask(
    scenario: Scenario, probe: Probe
) -> tuple[Scenario, Mapping[str, Any], discover.Discovery | None, tuple[str, ...]]:
    """The scenario with the server's protocol, model and control of lengths; `Bench.asked`; what
    was found if the protocol or the model was to be found; notes."""
    protocol, model, stream = scenario.protocol, scenario.model, scenario.stream
    overrides: dict[str, Any] = {}
    answer: discover.Accepted
    found: discover.Discovery | None = None
    if AUTO in (protocol, model):
        answer = found = discover.discover(
            probe,
            protocol=None if protocol == AUTO else protocol,
            model=None if model == AUTO else model,
            stream=stream,
        )
        overrides = {"protocol": found.protocol, "model": found.model}
        has_tokenizer = _first_tokenizer((found.model, found.tokenizer)) is not None
        notes = (found.describe(tokenizer=has_tokenizer), *found.notes)
        exact = has_tokenizer and found.protocol != OpenAiChatFormat.name
        limit = None if found.protocol == "embeddings" else found.max_model_len
        fitted = fitted_lengths(scenario, limit, exact=exact)
        if fitted:
            overrides |= fitted
            notes += (_FITTED.format(*fitted.values()),)
    else:
        answer = discover.accepts(
            *(probe, stream), protocol=protocol, model=model, ignore_eos=scenario.workload.ignore_eos
        )
        notes = answer.notes
        has_tokenizer = _first_tokenizer((model,)) is not None
    protocol = overrides.get("protocol", protocol)
    for name in scenario.client.adapters or () if protocol not in ("lmi", "tgi") else ():
        discover.accepts(probe, stream, protocol=protocol, model=name)  # reports a wrong name now
    if scenario.workload.ignore_eos and not answer.forces_length:
        overrides["workload.ignore_eos"] = False
        notes += (_NOT_FORCED,)
    options: dict[str, Any] = {}
    if isinstance(answer.wire_format, OpenAiChatFormat):
        options["length_field"] = answer.wire_format.length_field
    scenario = scenario.with_overrides(overrides) if overrides else scenario
    if protocol == OpenAiCompletionsFormat.name and has_tokenizer:
        options["token_ids"] = discover.takes_token_ids(probe, model=scenario.model, stream=stream)
        if not options["token_ids"]:
            notes += ("the server takes no token ids: prompts are sent as text",)
    tokenizer = found.tokenizer if found else None
    return scenario, {"tokenizer": tokenizer, "format": options}, found, notes


def fitted_lengths(scenario: Scenario, max_model_len: int | None, *, exact: bool) -> dict[str, int]:
    """Lengths for a default workload that exceeds the server's context; empty if all requests fit.

    exact  prompts have the planned length, without a chat template or an unknown tokenizer
    Raises InputError if another workload has a longer request than the server accepts.
    """
    workload = scenario.workload
    if max_model_len is None or workload.dataset is not None:
        return {}
    longest = longest_request(scenario)
    if longest <= max_model_len:
        return {}
    fitted = round(max_model_len * (0.5 if exact else _INEXACT_SHARE))
    usual = workload.model_dump(exclude={"ignore_eos", "reuse_prompts"}, exclude_defaults=True)
    if usual or not fitted:
        file = workload.trace or workload.agent_trace or workload.conversations
        mend = f"leave the longer ones out of {file}" if file else "lower --input-tokens or --output-tokens"
        mend = "lower the context of --agents" if workload.agents is not None else mend
        raise InputError(
            f"{redact_text(scenario.target)} takes {max_model_len:,} tokens a request, but the "
            f"workload has up to {longest:,}, input and output: {mend}"
        )
    return {"workload.input_tokens": fitted, "workload.output_tokens": fitted}


def _way(at: Endpoint, *, insecure: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Notes and facts of the way to a server: a proxy, a certificate that nobody checks, several
    addresses."""
    notes, facts = [], {}
    if at.proxy is not None:
        facts["proxy"] = at.proxy.name
        notes.append(
            f"warning: requests go through the environment's proxy {at.proxy.name}: its delay is "
            f"in every TTFT, and it may hold tokens back; NO_PROXY={at.host} connects directly"
        )
    elif at.unix is None:
        with contextlib.suppress(OSError):  # connecting fails with a message of its own
            found = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
            most = max(Counter(kind for kind, *_ in {each[::4] for each in found}).values())
            if most > 1:
                spread = "connections are spread over those that answer"
                notes.append(f"{at.host} has {most} addresses: {spread}")
    if at.scheme == "https" and insecure:
        facts["certificate"] = NOT_CHECKED
        notes.append(f"warning: the server's certificate is {NOT_CHECKED}")
    return tuple(notes), facts


def endpoint_bench(
    scenario: Scenario,
    url: str,
    listener: Listener,
    open_target: Callable[..., HttpTarget],
    *,
    title: str,
    facts: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    notes: tuple[str, ...],
    **more: Any,
) -> Bench:
    """A remote server, with retries if the scenario states them.

    open_target  makes the target; the scenario's options are its keywords
    more         further fields of the bench
    """
    client, tls = scenario.client, url.lower().startswith("https:")
    receive = choose_receive(client.receive, tls=tls, tell=listener.note)
    if receive.why is not None and not tls:
        listener.note(f"receiver: {receive.note}")
    at = parse_endpoint(url, find_format(OpenAiCompletionsFormat.name))
    way_notes, way_facts = _way(at, insecure=client.insecure)
    notes, facts = notes + way_notes, {**facts, **way_facts}
    facts = {key: value for key, value in facts.items() if value is not None}
    text: PromptText = common_words if tokenizer is None else ExactText(tokenizer)
    if tokenizer is None:
        notes += (
            f"no tokenizer of {scenario.model} on this machine: prompts are words, about one token "
            "each; the server's own counts are recorded if it states them",
        )

    async def run_in(main: Main) -> Any:
        target = open_target(
            model=scenario.model,
            stream=scenario.stream,
            native=receive.library,
            seed=scenario.seed,
            **client.model_dump(exclude={"receive", "retries", "reset_prefix_cache"}),
        )
        async with target:
            return await main(target if client.retries is None else RetryingTarget(target))

    return Bench(
        scenario=scenario,
        title=title,
        facts=facts | {"receiver": receive.note},
        prompts=lambda salt: make_prompts(scenario, text, tokenizer, salt),
        run=lambda main: run_on_sockets(run_in(main)),
        knee_facts=lambda _levels: KneeFacts(),
        notes=(*notes, *idle_in_engine(kind_of(scenario.target), scenario.engine)),
        spacing_s=SPACING_S,
        salted=not scenario.workload.reuse_prompts,
        **more,
    )


def _first_tokenizer(names: Sequence[str | None]) -> Tokenizer | None:
    return next((t for name in names if name and (t := find_tokenizer(name))), None)
