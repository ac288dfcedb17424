"""A server at a URL: what it speaks and serves is found by asking, then it is opened."""

from __future__ import annotations

import functools
import socket
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Listener
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.scenario import AUTO, Scenario
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.loadgen.ask.accepted import Accepted, accepts, takes_token_ids
from lmi_bench.loadgen.ask.discover import Discovery, discover
from lmi_bench.loadgen.aws.cloudwatch import LevelSpan
from lmi_bench.loadgen.http.endpoint import parse_endpoint
from lmi_bench.loadgen.http.native_harvest import ReceiveChoice, choose_receive
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import SPACING_S, HttpTarget
from lmi_bench.loadgen.prompts.prompts import CommonWords, ExactText, PromptText, TextCounter
from lmi_bench.loadgen.run.retry import RetryingTarget
from lmi_bench.targets.access import Access
from lmi_bench.targets.applies import idle_in_engine, kind_of
from lmi_bench.targets.bench import Bench, Main
from lmi_bench.targets.prompts import longest_request, make_prompts
from lmi_bench.targets.tokenizers import find_tokenizer
from lmi_bench.wire.format import find_format
from lmi_bench.wire.openai import OpenAiCompletionsFormat

_NOT_FORCED = (
    "warning: the server cannot be told to ignore the end of the text, so answers may be shorter "
    "than planned"
)


def http_bench(scenario: Scenario, access: Access, listener: Listener) -> Bench:
    """A URL; whatever the scenario leaves open is found by asking the server.

    Raises InputError where nothing that is known here answers, or the workload does not fit.
    """
    found = None
    if AUTO in (scenario.protocol, scenario.model):
        found = _discover(scenario, access, listener)
        scenario, notes = _resolved(scenario, found)
        stated_format = found.wire_format
    else:
        taken = _accepted(scenario, access, listener)
        scenario, notes = _with_lengths_as_taken(scenario, taken)
        stated_format = taken.wire_format
    tokenizers = (scenario.model, found.tokenizer if found else None)
    tokenizer = _first_tokenizer(tokenizers)
    wire_format = stated_format or find_format(scenario.protocol, stream=scenario.stream)
    headers = access.all_headers()
    if scenario.protocol == OpenAiCompletionsFormat.name and tokenizer is not None:
        wire_format, more = _with_token_ids(scenario, headers, listener)
        notes += more
    receive = choose_receiver(scenario, scenario.target, listener)
    facts: dict[str, Any] = {
        "kind": "http",
        "url": scenario.target,
        "protocol": scenario.protocol,
        "model": scenario.model,
        "headers": sorted(headers),
        "receiver": receive.note,
    }
    if found is not None:
        facts |= {
            "server": found.server,
            "max_model_len": found.max_model_len,
            "token_counts": found.token_source(tokenizer=tokenizer is not None),
        }
    return endpoint_bench(
        scenario,
        functools.partial(
            HttpTarget,
            scenario.target,
            wire_format,
            model=scenario.model,
            headers=headers,
            stream=scenario.stream,
            timestamps=scenario.client.timestamps,
            connections=scenario.client.connections,
            first_token_timeout_s=scenario.client.first_token_timeout_s,
            native=receive.library,
            count_tokens=None if tokenizer is None else TextCounter(tokenizer),
        ),
        title=f"{redact_text(scenario.target)}, {scenario.protocol}, {scenario.model}",
        facts=facts,
        tokenizers=tokenizers,
        notes=(*notes, *several_addresses(scenario.target)),
        secrets=access.secrets(),
        metrics_url=_metrics_page(scenario.target),
        metrics_headers=headers,
    )


def _with_token_ids(
    scenario: Scenario, headers: Mapping[str, str], listener: Listener
) -> tuple[OpenAiCompletionsFormat, tuple[str, ...]]:
    """The wire format with prompts as token ids where the server takes them, and a note if not."""
    token_ids = takes_token_ids(
        scenario.target,
        model=scenario.model,
        stream=scenario.stream,
        headers=headers,
        tell=listener.note,
    )
    refused = ("the server takes no token ids: prompts are sent as text",)
    return OpenAiCompletionsFormat(token_ids=token_ids), () if token_ids else refused


def choose_receiver(scenario: Scenario, url: str, listener: Listener) -> ReceiveChoice:
    """What reads this endpoint's sockets, with a note where a compiler is missing."""
    tls = url.lower().startswith("https:")
    choice = choose_receive(scenario.client.receive, tls=tls, tell=listener.note)
    if choice.why is not None and not tls:
        listener.note(f"receiver: {choice.note}")
    return choice


def several_addresses(url: str) -> tuple[str, ...]:
    """A note where the host name has several addresses."""
    at = parse_endpoint(url, find_format(OpenAiCompletionsFormat.name))
    try:
        found = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except OSError:
        return ()  # connecting fails with a message of its own
    most = max(len({place[0] for kind, *_, place in found if kind == one}) for one, *_ in found)
    if most < 2:
        return ()
    return (f"{at.host} has {most} addresses: connections are shared out among those that answer",)


def _discover(scenario: Scenario, access: Access, listener: Listener) -> Discovery:
    return discover(
        scenario.target,
        protocol=None if scenario.protocol == AUTO else scenario.protocol,
        model=None if scenario.model == AUTO else scenario.model,
        stream=scenario.stream,
        headers=access.all_headers(),
        tell=listener.note,
    )


def _accepted(scenario: Scenario, access: Access, listener: Listener) -> Accepted:
    """How the server takes a request of the stated protocol and model."""
    return accepts(
        scenario.target,
        protocol=scenario.protocol,
        model=scenario.model,
        stream=scenario.stream,
        ignore_eos=scenario.workload.ignore_eos,
        headers=access.all_headers(),
        tell=listener.note,
    )


def _with_lengths_as_taken(scenario: Scenario, taken: Accepted) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario with lengths that are forced only where the server does so, and what to tell."""
    if not scenario.workload.ignore_eos or taken.forces_length:
        return scenario, taken.notes
    plain = scenario.with_overrides({"workload.ignore_eos": False})
    return plain, (*taken.notes, _NOT_FORCED)


def _resolved(scenario: Scenario, found: Discovery) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario with what was found, and notes about it."""
    at_hand = _first_tokenizer((found.model, found.tokenizer)) is not None
    notes = [found.describe(tokenizer=at_hand), *found.notes]
    overrides: dict[str, Any] = {"protocol": found.protocol, "model": found.model}
    if scenario.workload.ignore_eos and not found.forces_length:
        overrides["workload.ignore_eos"] = False
        notes.append(_NOT_FORCED)
    if found.max_model_len is not None and scenario.workload.dataset is None:
        longest = longest_request(scenario)
        if longest > found.max_model_len:
            raise InputError(
                f"{redact_text(scenario.target)} takes {found.max_model_len:,} tokens a request, "
                f"but the workload has up to {longest:,}, input and output: lower --input-tokens "
                "or --output-tokens"
            )
    return scenario.with_overrides(overrides), tuple(notes)


def endpoint_bench(
    scenario: Scenario,
    open_target: Callable[[], HttpTarget],
    *,
    title: str,
    facts: Mapping[str, Any],
    tokenizers: tuple[str | None, ...],
    notes: tuple[str, ...],
    secrets: tuple[str, ...],
    usd_per_hour: float | None = None,
    count_instances: Callable[[], int | None] | None = None,
    cloudwatch: Callable[[Sequence[LevelSpan]], list[dict[str, Any]]] | None = None,
    metrics_url: str | None = None,
    metrics_headers: Mapping[str, str] | None = None,
) -> Bench:
    tokenizer = _first_tokenizer(tokenizers)
    text: PromptText = CommonWords() if tokenizer is None else ExactText(tokenizer)
    words = (
        f"no tokenizer of {scenario.model} at hand: prompts are words, about one token each; "
        "the server's own counts are recorded where it states them"
    )

    opened: Callable[[], HttpTarget | RetryingTarget] = open_target
    if scenario.client.retries is not None:
        opened = functools.partial(_retrying, open_target)

    async def run_in(main: Main) -> Any:
        async with opened() as target:
            return await main(target)

    return Bench(
        scenario=scenario,
        title=title,
        facts={key: value for key, value in facts.items() if value is not None},
        prompts=lambda salt: make_prompts(scenario, text, tokenizer, salt),
        run=lambda main: run_on_sockets(run_in(main)),
        knee_facts=lambda _levels: KneeFacts(),
        notes=(
            *notes,
            *(() if tokenizer is not None else (words,)),
            *idle_in_engine(kind_of(scenario.target), scenario.engine),
        ),
        secrets=secrets,
        spacing_s=SPACING_S,
        salted=not scenario.workload.reuse_prompts,
        usd_per_hour=usd_per_hour,
        count_instances=count_instances,
        cloudwatch=cloudwatch,
        open_target=opened,
        metrics_url=metrics_url,
        metrics_headers=metrics_headers or {},
    )


def _first_tokenizer(names: Sequence[str | None]) -> Tokenizer | None:
    return next((t for name in names if name and (t := find_tokenizer(name))), None)


def _retrying(open_target: Callable[[], HttpTarget]) -> RetryingTarget:
    return RetryingTarget(open_target())


def _metrics_page(url: str) -> str:
    """Where a server of this URL keeps its metrics, if it does."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, "/metrics", "", ""))
