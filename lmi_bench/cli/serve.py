"""`lmi-bench serve`: the bundled engine, or its simulation, behind LMI, OpenAI and TGI routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.serve import ServeSettings

if TYPE_CHECKING:
    from lmi_bench.engine.server.app import Listening


@spread_options
def serve(settings: ServeSettings) -> None:
    """Serve a model over HTTP: LMI, OpenAI, TGI and SageMaker's runtime paths, until Ctrl-C.

    With --executor simulated --instance ml.g5.2xlarge --model llama-2-7b it answers with the
    predicted timing of that instance and needs no GPU. TGI's limits are read from the environment
    where no option states them: MAX_CONCURRENT_REQUESTS, MAX_TOTAL_TOKENS, MAX_INPUT_TOKENS (or
    MAX_INPUT_LENGTH), MAX_BATCH_PREFILL_TOKENS, MAX_BATCH_TOTAL_TOKENS. With --serving-properties,
    or where OPTION_ variables are set, the settings are read as an LMI container reads them
    instead: an option first, then the file, then the environment.
    """
    from lmi_bench.cli.console import note, say, terminal
    from lmi_bench.jobs.serve import serve as run

    with terminal() as listener:

        def on_ready(where: Listening, model: str) -> None:
            listener.close()
            if where.warning is not None:
                listener.warn(where.warning)
            say(f"serving {model} at {where.url}  (Ctrl-C ends it)")

        served = run(settings, listener, on_ready=on_ready)
    if served is not None:
        stats = served.stats
        note(
            f"generated {stats.done.generation_tokens:,} tokens in {stats.done.steps:,} steps; "
            f"{stats.used_blocks:,} of {stats.total_blocks:,} KV blocks in use at the end"
        )
        for line in served.notes:
            note(line)
