"""One server from its settings to its end."""

from __future__ import annotations

import asyncio

from lmi_bench.catalog.models import find_model
from lmi_bench.cli.compose import EngineParts, open_simulated_engine, open_torch_engine
from lmi_bench.cli.console import note, say, warn
from lmi_bench.engine.server.app import Listening, build_app, serve
from lmi_bench.engine.server.codec import Codec
from lmi_bench.engine.server.plain_tokenizer import PlainTokenizer
from lmi_bench.scenario import EngineSection


def run(model: str, settings: EngineSection, *, instance: str | None, host: str, port: int) -> None:
    """Load, listen, and serve until a signal. Raises InputError before anything is served."""
    if instance is None:
        parts = open_torch_engine(model, settings)
    else:
        longest = find_model(model).max_positions
        parts = open_simulated_engine(model, instance, settings, max_total_tokens=longest)
    for line in parts.notes:
        note(line)
    asyncio.run(_serve(parts, host, port))


async def _serve(parts: EngineParts, host: str, port: int) -> None:
    codec: Codec = parts.tokenizer or PlainTokenizer(parts.shape.vocab_size)

    def on_ready(where: Listening) -> None:
        if where.warning is not None:
            warn(where.warning)
        say(f"serving {parts.shape.name} at {where.url}  (Ctrl-C ends it)")

    async with parts.engine() as engine:
        app = build_app(
            engine,
            codec,
            model_name=parts.shape.name,
            max_model_len=parts.config.max_model_len,
        )
        await serve(app, host, port, on_ready=on_ready)
