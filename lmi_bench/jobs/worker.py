"""One worker of a sweep: it opens the sweep's target and sends its share of each level.

It ends when its channel closes. While a level runs it answers pings at once, so the sweep knows
its clock and whether it still gets a core.
"""

import asyncio
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from lmi_bench.core.errors import EXIT_FAILED, InputError, LmiBenchError
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.scenario import FILES, Scenario, parse_scenario
from lmi_bench.core.units import s_to_ms
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.channel import Channel, Failed, Job, Message, Ping, Ready, Start, Stop
from lmi_bench.loadgen.run.hosts import PIPE_SECRET, dial, read_secret
from lmi_bench.loadgen.run.level_runner import LevelOrder, LevelRunner, Progress
from lmi_bench.loadgen.run.sweep import first_error
from lmi_bench.loadgen.run.target import Target
from lmi_bench.targets.bench import Access, read_headers
from lmi_bench.targets.open import open_bench

_MOST_LATE_S = 0.001
_GONE_S = 60.0  # without a ping in a level; the sweep may be busy with the part of another worker
_SAMPLED = LevelSpec(0, Load(concurrency=1), num_requests=1)


def sample_of(prompts: Prompts, scenario: Scenario | None = None) -> str:
    """A digest of one request, and of the files that the scenario's prompts and times come from."""
    digest = hashlib.sha256(repr(prompts.request(_SAMPLED, -1)).encode())
    named = () if scenario is None else (getattr(scenario.workload, name) for name in FILES)
    for path in map(Path, filter(None, named)):
        if path.is_file():  # a pipe can be read only once
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def work(connect: str | None, api_key: str | None, headers: Sequence[str], tell: Callable[[str], None]) -> None:
    """Send levels until the sweep closes the connection.

    connect  address of a sweep that listens; None: stdin and stdout lead to it
    api_key, headers  of the target, which a sweep at a pipe states itself
    tell     is given a line while a sweep is awaited
    Raises InputError for another version or secret, or if the target cannot be opened here.
    """
    number = os.environ.get("JOB_COMPLETION_INDEX", "")  # of a pod of a Kubernetes Indexed Job
    access = Access(api_key, read_headers(headers))
    secret = PIPE_SECRET if connect is None else read_secret()
    channel = _by_pipe() if connect is None else dial(connect, tell)
    try:
        channel.greet(secret, Ready(int(number) if number.isdecimal() else None))
        job = channel.receive(Job)
        try:
            scenario = parse_scenario(dict(job.scenario))
            if connect is None:
                access = Access(headers=job.headers)
            missing = job.headers.keys() - access.all_headers(scenario.protocol).keys()
            if missing:
                raise InputError(
                    f"the sweep's requests have the headers {', '.join(sorted(missing))}, which no "
                    "message holds: set LMI_BENCH_API_KEY or --header for `worker` too"
                )
            bench = open_bench(scenario, replace(access, asked=job.asked))
            prompts = bench.prompts(job.salt)
            if sample_of(prompts, scenario) != job.sample:
                raise InputError(
                    "this host makes other prompts than the sweep's: put the model's tokenizer and "
                    "the workload's files at the same paths here"
                )
        except LmiBenchError as exc:
            channel.send(Failed(str(exc), exc.exit_code))
            raise
        bench.run(lambda target: _serve(channel, target, prompts))
    finally:
        channel.close()


def _by_pipe() -> Channel:
    """The channel over stdin and stdout; what is printed from now on goes to stderr."""
    if sys.stdin.isatty():
        raise InputError("sweep --hosts starts its workers itself; use --connect to dial in")
    source = Connection(os.dup(sys.stdin.fileno()), writable=False)
    sink = Connection(os.dup(sys.stdout.fileno()), readable=False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return Channel(source, sink, "the sweep", "worker")


async def _serve(channel: Channel, target: Target, prompts: Prompts) -> None:
    """Send levels until the channel closes."""
    loop, serving, heard_s = asyncio.get_running_loop(), asyncio.current_task(), 0.0
    orders: asyncio.Queue[LevelOrder | Start] = asyncio.Queue()
    runner: LevelRunner  # of the last order; before one nothing is asked
    fault: str | None = None
    assert serving is not None

    def heard(message: Message | LmiBenchError) -> None:
        nonlocal heard_s
        heard_s = time.monotonic()
        if isinstance(message, Ping):
            channel.send(Ping(message.sent_s, heard_s, channel.heard_s, runner.watch.late_frac(), fault))
        elif isinstance(message, Stop):
            runner.stop(message.reason)
        elif isinstance(message, LevelOrder | Start):
            orders.put_nowait(message)
        else:  # the sweep is gone
            serving.cancel()

    async def send_level(order: LevelOrder) -> None:
        nonlocal runner, fault
        fault = None

        async def start() -> float:
            nonlocal fault
            channel.send(Ready())
            message = await orders.get()
            assert isinstance(message, Start)
            late_s = loop.time() - message.at_s
            if late_s > _MOST_LATE_S:
                fault = f"the start reached it {s_to_ms(late_s):,.0f} ms late"
            await asyncio.sleep(-late_s)
            return message.at_s

        def on_progress(state: Progress) -> None:
            if state.state == "running" and loop.time() > heard_s + _GONE_S:
                serving.cancel()  # the sweep's host has lost its power
            if state.state in ("running", "decoding"):
                channel.send(state)

        def tell(record: RequestRecord) -> bool:
            channel.send(record.shifted(0.0))
            return False

        rules = replace(order.rules, watch=(lambda _: tell) if order.tells else None)
        runner = LevelRunner(replace(order, rules=rules), target, prompts, on_progress)
        channel.send(replace(await runner.run_part(start), fault=fault))

    channel.listen(heard)
    channel.send(Ready())
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            order = await orders.get()
            assert isinstance(order, LevelOrder)
            try:
                await send_level(order)
            except* LmiBenchError as group:
                error = first_error(group)
                channel.send(Failed(str(error), getattr(error, "exit_code", EXIT_FAILED)))
