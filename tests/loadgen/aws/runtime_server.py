"""The bundled server behind SageMaker's paths, on a thread of its own: boto3 blocks, we do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import boto3

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.server.app import build_app, listening
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.engine.server.sagemaker_routes import SignatureCheck
from lmi_bench.engine.simulated import SimulatedExecutor

ACCESS_KEY, SECRET_KEY, REGION = "AKIDEXAMPLE", "not-a-secret", "eu-west-3"


def dummy_credentials(monkeypatch, tmp_path):
    """The credentials that the servers here know, and none of the machine's own."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # may hold those of an earlier test
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)


class ConstantStep:
    def __init__(self, step_s):
        self.step_s = step_s

    def step_time_s(self, shape):
        return self.step_s


class Dying(SimulatedExecutor):
    """Fails at one of its steps."""

    def __init__(self, at_step):
        super().__init__(ConstantStep(0.001))
        self.at_step = at_step
        self.num_steps = 0

    async def execute(self, batch):
        self.num_steps += 1
        if self.num_steps > self.at_step:
            raise EngineError("a rank died")
        return await super().execute(batch)


@contextmanager
def runtime_server(
    *, executor=None, step_s=0.002, signed=True, model="toy", app_options=None, **settings
) -> Iterator[str]:
    """The URL of a server that streams 2 ms a token and checks signatures."""
    config = SchedulerConfig(**({"num_blocks": 256, "max_model_len": 512} | settings))
    executor = executor or SimulatedExecutor(ConstantStep(step_s))
    check = SignatureCheck(ACCESS_KEY, SECRET_KEY) if signed else None
    started = threading.Event()
    where, failures = [], []

    async def serve(stop):
        async with AsyncEngine(Scheduler(config), executor) as engine:
            app = build_app(
                engine,
                PlainTokenizer(),
                model_name=model,
                max_model_len=config.max_model_len,
                signature_check=check,
                **(app_options or {}),
            )
            async with listening(app, port=0, shutdown_timeout_s=1) as listening_at:
                where.append((listening_at.url, asyncio.get_running_loop(), stop))
                started.set()
                await stop.wait()

    def run():
        try:
            asyncio.run(serve(asyncio.Event()))
        except BaseException as exc:  # noqa: BLE001  (raised again by whoever waits)
            failures.append(exc)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(120)
    if not where:
        raise failures[0]
    url, loop, stop = where[0]
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
    dead = [exc for exc in failures if not isinstance(exc, EngineError)]
    assert not dead, dead
