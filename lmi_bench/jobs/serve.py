"""One server from its settings to its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import note, say, terminal, warn
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.server.app import Listening, build_app, check_address, serve
from lmi_bench.engine.server.codec import Codec
from lmi_bench.engine.server.formatters import (
    NO_FORMATTERS,
    Formatters,
    load_formatters,
)
from lmi_bench.engine.server.lmi_reply import LMI_REPLIES
from lmi_bench.engine.server.openai_request import Message
from lmi_bench.engine.server.openai_routes import ChatEncoder
from lmi_bench.engine.server.plain_tokenizer import PlainTokenizer
from lmi_bench.engine.server.sagemaker_routes import credentials_check
from lmi_bench.engine.server.sigv4 import SignatureCheck
from lmi_bench.engine.step_trace import StepTrace
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.launching import follow_launcher
from lmi_bench.targets.loading_deadline import loading_deadline
from lmi_bench.targets.parts import EngineParts
from lmi_bench.targets.prepared_steps import count_notes
from lmi_bench.targets.simulated import open_simulated_engine


def run(
    model: str,
    settings: EngineSection,
    *,
    instance: str | None,
    host: str,
    port: int,
    lmi_replies: str = "rolling",
    require_signature: bool = False,
    loading_timeout_s: int | None = None,
    trace: Path | None = None,
    model_py: Path | None = None,
) -> None:
    """Load, listen, and serve until a signal. Raises InputError before anything is served.

    lmi_replies        whose replies the LMI routes imitate, one of LMI_REPLIES
    require_signature  on SageMaker's paths, by the key in this process's environment
    loading_timeout_s  after which loading is given up and the process ends; None: never
    trace              file for a Chrome trace of steps and requests
    model_py           program whose formatters change bodies; run before anything is loaded
    """
    if lmi_replies not in LMI_REPLIES:
        raise InputError(f"--lmi-replies {lmi_replies}: use one of {', '.join(LMI_REPLIES)}")
    check = None
    if require_signature:
        check = credentials_check(
            os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        )
    formatters = NO_FORMATTERS if model_py is None else load_formatters(model_py)
    if instance is None and follow_launcher(settings):
        return
    check_address(host, port)  # a large model is minutes to load
    with nullcontext() if trace is None else StepTrace(trace) as tracer:
        with loading_deadline(model, loading_timeout_s), terminal() as listener:
            if instance is None:
                parts = open_torch_engine(model, settings, listener)
            else:
                longest = find_model(model).max_positions
                parts = open_simulated_engine(model, instance, settings, max_total_tokens=longest)
        for line in parts.notes:
            note(line)
        asyncio.run(_serve(parts, host, port, lmi_replies, check, tracer, formatters))


async def _serve(
    parts: EngineParts,
    host: str,
    port: int,
    lmi_replies: str,
    check: SignatureCheck | None,
    trace: StepTrace | None,
    formatters: Formatters,
) -> None:
    codec: Codec = parts.tokenizer or PlainTokenizer(parts.shape.vocab_size)
    encode_chat = None if parts.tokenizer is None else chat_encoder(parts.tokenizer)

    def on_ready(where: Listening) -> None:
        if where.warning is not None:
            warn(where.warning)
        say(f"serving {parts.shape.name} at {where.url}  (Ctrl-C ends it)")

    async with parts.engine(trace) as engine:
        app = build_app(
            engine,
            codec,
            model_name=parts.shape.name,
            # a chat that names no length asks for all that is left, and a cache may hold less
            max_model_len=min(parts.config.max_model_len, parts.config.cache_tokens),
            vocab_size=parts.shape.vocab_size,
            signature_check=check,
            lmi_reply=LMI_REPLIES[lmi_replies],
            formatters=formatters,
            encode_chat=encode_chat,
        )
        await serve(app, host, port, on_ready=on_ready, engine=engine)
        engine.audit()
        stats = engine.stats()
        note(
            f"generated {stats.generation_tokens:,} tokens in {stats.steps:,} steps; "
            f"{stats.used_blocks:,} of {stats.total_blocks:,} KV blocks in use at the end"
        )
        for line in count_notes(parts.executors):
            note(line)


def chat_encoder(tokenizer: Tokenizer) -> ChatEncoder | None:
    """How the model of a tokenizer's folder wants a chat; None where it has no template."""
    template = None if tokenizer.folder is None else ChatTemplate.from_folder(tokenizer.folder)
    if template is None:
        return None

    def encode(messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        text = template.render([asdict(message) for message in messages], options)
        return tokenizer.encode(text, add_special_tokens=False)  # the template has them

    return encode
