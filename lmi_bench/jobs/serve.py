"""Runs a server from its settings until it is stopped."""

import asyncio
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import DEFAULT_MODEL, EngineSection, parse_scenario
from lmi_bench.deploy.option_table import untranslated_variables
from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.chrome_trace import ChromeTrace
from lmi_bench.engine.scheduling.stats import EngineStats
from lmi_bench.engine.server import app as server
from lmi_bench.engine.server.codec import Codec, PlainTokenizer
from lmi_bench.engine.server.formatters import NO_FORMATTERS, load_formatters
from lmi_bench.engine.server.lmi_routes import AS_TGI, LMI_REPLIES, Replies
from lmi_bench.engine.server.sagemaker_routes import SignatureCheck, credentials_check
from lmi_bench.jobs import serving_file
from lmi_bench.jobs.settings.bundled import ServeSettings
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.targets.applies import refuse_idle
from lmi_bench.targets.back_ends import count_notes
from lmi_bench.targets.bundled import loading_deadline, open_torch_engine
from lmi_bench.targets.parts import EngineParts
from lmi_bench.targets.prompts import weights_notes
from lmi_bench.targets.simulated import open_simulated_engine

OnReady = Callable[[server.Listening, str], None]
"""Called with the address and the model's name when the server is ready."""


_BOUND = {"max_concurrent_requests": 4096}  # else a burst waits for longer than its clients do
_REPLIES = (*LMI_REPLIES, AS_TGI)


def serve(
    settings: ServeSettings, listener: Listener = SILENT, *, on_ready: OnReady
) -> tuple[EngineStats, tuple[str, ...]]:
    """Load, listen, and serve until a signal. Raises InputError before anything is served.

    Returns the engine's statistics when the server ended, and notes on its prepared steps.
    """
    settings, engine, streams = _resolved(settings, listener)
    if settings.lmi_replies not in (None, *_REPLIES):
        raise InputError(f"--lmi-replies {settings.lmi_replies}: use one of {', '.join(_REPLIES)}")
    check = None
    if settings.require_signature:
        check = credentials_check(os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY"))
    formatters = NO_FORMATTERS
    if settings.model_py is not None:  # runs before anything is loaded
        formatters = load_formatters(settings.model_py)
    server.check_address(settings.host, settings.port)  # a large model is minutes to load
    trace = settings.step_trace
    with nullcontext() if trace is None else ChromeTrace(trace) as tracer:
        parts = _load(settings, engine, listener)
        config = replace(parts.config, client_share=settings.client_share)
        parts = replace(parts, config=config)
        computed = "" if settings.instance else parts.shape.name  # a simulation has no text
        for line in (*weights_notes(computed), *parts.notes):
            listener.note(line)
        if parts.tokenizer is not None and parts.tokenizer.sampling:
            drawn = [f"{name} {value:g}" for name, value in parts.tokenizer.sampling.items()]
            listener.note(f"sampling of OpenAI requests that state none: {', '.join(drawn)}")
        replies = Replies(settings.lmi_replies or "rolling", streams, formatters)
        return asyncio.run(_serve(parts, settings, check, replies, on_ready, tracer))


def _resolved(settings: ServeSettings, listener: Listener) -> tuple[ServeSettings, EngineSection, bool | None]:
    """The settings completed by a container's file and the environment, the engine's, and
    whether the LMI routes stream (None: as a request says)."""
    stated = stated_settings(settings.model_options, settings.batching)
    options = [f"engine.{name}" for name in stated]
    model, timeout_s = settings.model, settings.model_loading_timeout
    path, replies, streams = settings.serving_properties, settings.lmi_replies, None
    has_options = any(name.startswith("OPTION_") and text for name, text in os.environ.items())
    if path is not None or has_options:
        file = serving_file.read_serving_file(
            path,
            os.environ,
            simulated=settings.executor == "simulated",
            note=listener.note,
            djl_version=settings.djl_version,
        )
        stated = {**file.engine, **stated}  # options override the file
        if stated.get("artefact") is not None:
            stated.pop("compile", None)  # the file asks for compiled steps, and here they are
        model = model or file.model
        timeout_s = timeout_s or file.loading_timeout_s
        replies, streams = replies or file.lmi_replies, file.lmi_streams
        beside = serving_file.model_py_of(path)
        if settings.model_py is None and beside is not None:
            listener.note(f"{beside} is not run: --model-py {beside} uses its formatters")
    else:
        if settings.djl_version is not None:
            raise InputError("--djl-version is of a serving.properties or OPTION_ variables: there are none here")
        for setting, (variable, value) in serving_file.limits_from_environment(os.environ).items():
            if setting not in stated:
                stated[setting] = value
                listener.note(f"{variable}={value} from the environment")
        if replies is None and untranslated_variables(os.environ):
            replies = AS_TGI
            listener.note("SageMaker's paths answer as a TGI container's: in a list")
    engine = parse_scenario({"engine": {**_BOUND, **stated}}, source="serve").engine
    refuse_idle("bundled" if settings.instance is None else "simulated", options, engine)
    found = replace(settings, model=model or DEFAULT_MODEL, model_loading_timeout=timeout_s, lmi_replies=replies)
    return found, engine, streams


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
    replies: Replies,
    on_ready: OnReady,
    trace: ChromeTrace | None,
) -> tuple[EngineStats, tuple[str, ...]]:
    name = parts.shape.name
    folder = None if parts.tokenizer is None else parts.tokenizer.folder
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
            replies=replies,
            overhead_s=parts.request_overhead_s,
            api_key=settings.api_key,
            fair_by=settings.fair_by,
            chat_template=None if folder is None else ChatTemplate.from_folder(folder),
        )
        await server.serve(
            app, settings.host, settings.port, on_ready=lambda where: on_ready(where, name), engine=engine
        )
        engine.audit()
        return engine.stats(), count_notes(parts.executors)
