"""Runs a server from its settings, an LMI or TGI container's included, until it is stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lmi_bench.analysis.model.builtin_profiles import prior_of_engine
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import DEFAULT_MODEL, EngineSection, parse_scenario
from lmi_bench.deploy.bundle import PROPERTIES, unpack_properties
from lmi_bench.deploy.bundled_engine import BundledSettings, bundled_settings
from lmi_bench.deploy.checks import check_settings, container_of
from lmi_bench.deploy.option_table import effective_settings, untranslated_variables
from lmi_bench.deploy.properties import parse_properties, read_properties
from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.chrome_trace import ChromeTrace
from lmi_bench.engine.scheduling.stats import EngineStats
from lmi_bench.engine.server import app as server
from lmi_bench.engine.server.answer import Codec, PlainTokenizer
from lmi_bench.engine.server.formatters import NO_FORMATTERS, Formatters, load_formatters
from lmi_bench.engine.server.lmi_routes import LMI_REPLIES
from lmi_bench.engine.server.openai_request import Message
from lmi_bench.engine.server.openai_routes import ChatEncoder
from lmi_bench.engine.server.sagemaker_routes import SignatureCheck, credentials_check
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.jobs.settings.bundled import ServeSettings
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.models.folder import is_model_folder
from lmi_bench.targets.applies import refuse_idle
from lmi_bench.targets.back_ends import count_notes
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.parts import EngineParts
from lmi_bench.targets.process import follow_launcher, loading_deadline
from lmi_bench.targets.profiles import SHIPPED
from lmi_bench.targets.simulated import open_simulated_engine

_TGI_LIMITS: Final = {
    "MAX_CONCURRENT_REQUESTS": "max_concurrent_requests",
    "MAX_TOTAL_TOKENS": "max_model_len",
    "MAX_INPUT_TOKENS": "max_input_tokens",
    "MAX_INPUT_LENGTH": "max_input_tokens",  # the older name
    "MAX_BATCH_PREFILL_TOKENS": "max_rolling_batch_prefill_tokens",
    "MAX_BATCH_TOTAL_TOKENS": "max_batch_total_tokens",
}


def is_lmi_environment(environ: Mapping[str, str]) -> bool:
    """Whether the environment states options as LMI containers read them."""
    return any(name.startswith("OPTION_") and value for name, value in environ.items())


def load_properties(path: Path) -> dict[str, str]:
    """Keys and values of a file, of a folder's serving.properties, or of an archive's."""
    if path.is_dir():
        return read_properties(path / PROPERTIES)
    if path.name.endswith((".tar.gz", ".tgz")):
        return parse_properties(unpack_properties(path), source=f"{path}:{PROPERTIES}")
    return read_properties(path)


def model_py_of(path: Path | None) -> Path | None:
    """The model.py beside a serving.properties: a container would run it."""
    if path is None or path.name.endswith((".tar.gz", ".tgz")):
        return None
    beside = (path if path.is_dir() else path.parent) / "model.py"
    return beside if beside.is_file() else None


def read_serving_file(
    path: Path | None,
    environ: Mapping[str, str],
    *,
    simulated: bool,
    note: Callable[[str], None],
    djl_version: str,
) -> BundledSettings:
    """The settings of `serve`; `note` is called with the origin of each value and each trap.

    djl_version  version of djl-serving whose rules apply

    Raises InputError for a name or a value that containers refuse, for what the bundled engine
    refuses, and if the model is neither named nor beside the file.
    """
    source = "the environment" if path is None else str(path)
    properties = {} if path is None else load_properties(path)
    settings = effective_settings(properties, environ, source=source)
    era, vllm = container_of(djl_version)
    verdict = check_settings(
        {name: setting.value for name, setting in settings.items()}, era=era, vllm=vllm
    )
    verdict.raise_mistakes(source)
    found = bundled_settings(settings, simulated=simulated, era=era)
    profile = _profile_of(vllm) if simulated and found.lmi_replies == "async" else None
    if profile is not None:
        found = replace(found, engine={"profile": profile, **found.engine})
    for name, setting in settings.items():
        if setting.origin != source:
            note(f"{name}={setting.value} from the environment ({setting.origin})")
    note(f"batching: {found.batching}; answers of the LMI routes: {found.lmi_replies}")
    for trap in verdict.traps:
        note(f"in a container of djl-serving {djl_version}: {trap}")
    if found.ignored:
        note(f"without effect on the bundled engine: {', '.join(found.ignored)}")
    for name in untranslated_variables(environ):
        note(f"{name} is set, but LMI containers do not read it (option.max_model_len is theirs)")
    return replace(found, model=_model_of(found, path, simulated=simulated))


def _profile_of(vllm: str) -> str | None:
    """The shipped profile nearest to a version of vLLM; None if none is near."""
    if not vllm:
        return None
    prior = prior_of_engine(f"vllm {vllm}", models=(), accelerators=(), open_loop=False)
    return next((name for name, shipped in SHIPPED.items() if shipped.label == prior.label), None)


def _model_of(found: BundledSettings, path: Path | None, *, simulated: bool) -> str | None:
    if found.model is not None and "://" in found.model and not simulated:
        raise InputError(
            f"option.model_id={found.model}: this command downloads nothing; copy the weights "
            "into a folder and name it, or give --model"
        )
    if found.model is None and path is not None:
        beside = path if path.is_dir() else path.parent
        if is_model_folder(beside):
            return str(beside)
    return found.model


def limits_from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Engine settings by name, each with TGI's variable and its value.

    An empty variable counts as absent. Raises InputError for a value that is not a whole number
    above 0, and if both variables for the maximum prompt length are set.
    """
    found: dict[str, tuple[str, int]] = {}
    for variable, setting in _TGI_LIMITS.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise InputError(
                f"{variable}={text} in the environment: expected a whole number above 0"
            )
        if setting in found:
            raise InputError(
                f"{found[setting][0]} and {variable} are both set, and mean the same: unset one"
            )
        found[setting] = (variable, int(text))
    return found


OnReady = Callable[[server.Listening, str], None]
"""Called with the address and the model's name when the server is ready."""


@dataclass(frozen=True, slots=True)
class Served:
    """The engine's statistics when the server ended, and notes on its prepared steps."""

    stats: EngineStats
    notes: tuple[str, ...]


def serve(
    settings: ServeSettings, listener: Listener = SILENT, *, on_ready: OnReady | None = None
) -> Served | None:
    """Load, listen, and serve until a signal. Raises InputError before anything is served.

    None in a process that a launcher has started as a further rank.
    """
    settings, engine = _resolved(settings, listener)
    if settings.lmi_replies not in (None, *LMI_REPLIES):
        raise InputError(
            f"--lmi-replies {settings.lmi_replies}: use one of {', '.join(LMI_REPLIES)}"
        )
    check = None
    if settings.require_signature:
        check = credentials_check(
            os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        )
    formatters = NO_FORMATTERS
    if settings.model_py is not None:  # runs before anything is loaded
        formatters = load_formatters(settings.model_py)
    if settings.instance is None and follow_launcher(engine):
        return None
    server.check_address(settings.host, settings.port)  # a large model is minutes to load
    trace = settings.step_trace
    with nullcontext() if trace is None else ChromeTrace(trace) as tracer:
        parts = _load(settings, engine, listener)
        for line in parts.notes:
            listener.note(line)
        return asyncio.run(_serve(parts, settings, check, formatters, on_ready, tracer))


def _resolved(settings: ServeSettings, listener: Listener) -> tuple[ServeSettings, EngineSection]:
    """The settings completed by a container's file and the environment, and the engine's."""
    stated = stated_settings(settings.model_options, settings.batching)
    options = [f"engine.{name}" for name in stated]
    model, timeout_s = settings.model, settings.model_loading_timeout
    path, replies = settings.serving_properties, settings.lmi_replies
    if path is not None or is_lmi_environment(os.environ):
        file = read_serving_file(
            path,
            os.environ,
            simulated=settings.executor == "simulated",
            note=listener.note,
            djl_version=settings.djl_version,
        )
        stated = {**file.engine, **stated}  # options override the file
        model = model or file.model
        timeout_s = timeout_s or file.loading_timeout_s
        replies = replies or file.lmi_replies
        beside = model_py_of(path)
        if settings.model_py is None and beside is not None:
            listener.note(f"{beside} is not run: --model-py {beside} uses its formatters")
    else:
        for setting, (variable, value) in limits_from_environment(os.environ).items():
            if setting not in stated:
                stated[setting] = value
                listener.note(f"{variable}={value} from the environment")
    engine = parse_scenario({"engine": stated}, source="serve").engine
    refuse_idle("bundled" if settings.instance is None else "simulated", options, engine)
    found = replace(
        settings,
        model=model or DEFAULT_MODEL,
        model_loading_timeout=timeout_s,
        lmi_replies=replies,
    )
    return found, engine


def _load(settings: ServeSettings, engine: EngineSection, listener: Listener) -> EngineParts:
    model = settings.model or DEFAULT_MODEL  # as `_resolved` left it
    with loading_deadline(model, settings.model_loading_timeout):
        if settings.instance is None:
            return open_torch_engine(model, engine, listener)
        longest = find_model(model).max_positions
        return open_simulated_engine(model, settings.instance, engine, max_total_tokens=longest)


async def _serve(
    parts: EngineParts,
    settings: ServeSettings,
    check: SignatureCheck | None,
    formatters: Formatters,
    on_ready: OnReady | None,
    trace: ChromeTrace | None,
) -> Served:
    name = parts.shape.name

    def listens(where: server.Listening) -> None:
        if on_ready is not None:
            on_ready(where, name)

    codec: Codec = parts.tokenizer or PlainTokenizer(parts.shape.vocab_size)
    async with parts.engine(trace) as engine:
        app = server.build_app(
            engine,
            codec,
            model_name=name,
            # a chat without a length gets all that is left, and the cache may be smaller
            max_model_len=min(parts.config.max_model_len, parts.config.cache_tokens),
            vocab_size=parts.shape.vocab_size,
            signature_check=check,
            lmi_reply=LMI_REPLIES[settings.lmi_replies or "rolling"],
            formatters=formatters,
            overhead_s=parts.request_overhead_s,
            encode_chat=None if parts.tokenizer is None else chat_encoder(parts.tokenizer),
        )
        await server.serve(app, settings.host, settings.port, on_ready=listens, engine=engine)
        engine.audit()
        return Served(engine.stats(), count_notes(parts.executors))


def chat_encoder(tokenizer: Tokenizer) -> ChatEncoder | None:
    """The encoder for a model's chat template; None if its folder has no template."""
    template = None if tokenizer.folder is None else ChatTemplate.from_folder(tokenizer.folder)
    if template is None:
        return None

    def encode(messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        text = template.render([asdict(message) for message in messages], options)
        return tokenizer.encode(text, add_special_tokens=False)  # the template has them

    return encode
