"""A server on a free port over a real engine: nothing between client and scheduler is faked."""

import asyncio
import codecs
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType

import aiohttp
import pytest

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.batch import StepOutput
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.server.app import build_app, listening
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.engine.simulated import SimulatedExecutor


class ConstantStep:
    """Every step takes the same time."""

    def __init__(self, step_s):
        self.step_s = step_s

    def step_time_s(self, shape):
        return self.step_s


class ScriptedExecutor:
    """The i-th token of every sequence is script[i]; `gate` holds back all steps but one."""

    block_size = 16
    max_in_flight = 1

    def __init__(self, script, *, fails_at_step=None, gate=None, on_step=None):
        self.script = script
        self.fails_at_step = fails_at_step
        self.gate = gate
        self.on_step = on_step
        self.num_steps = 0
        self.num_given = {}

    async def execute(self, batch):
        await asyncio.sleep(0)
        if self.gate is not None and self.num_steps > 0:
            await self.gate.wait()
        if self.num_steps == self.fails_at_step:
            raise EngineError("a rank died")
        if self.on_step is not None:
            self.on_step(self.num_steps)
        self.num_steps += 1
        outputs = []
        for entry in batch.entries:
            index = self.num_given.get(entry.seq_id, 0)
            self.num_given[entry.seq_id] = index + 1
            token_id = self.script[index % len(self.script)]
            logprobs = (-0.5,) if entry.sampling.logprobs else None
            ranked = ((token_id, -0.5), (token_id + 1, -1.5))[: entry.sampling.top_logprobs]
            outputs.append(StepOutput(entry.seq_id, (token_id,), logprobs, (ranked,)))
        return outputs

    async def close(self):
        pass


class ByteCodec:
    """One token a byte of UTF-8, so that most characters beyond ASCII take several; 0 is EOS."""

    vocab_size = 256
    eos_token_ids = (0,)
    sampling = MappingProxyType({})
    max_new_tokens = None
    longest_token_bytes = 1
    has_channels = False

    def encode(self, text, **options):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(i for i in token_ids if i or not skip_special_tokens).decode(errors="replace")

    def token_text(self, token_id):
        return bytes([token_id]).decode(errors="replace")

    def token_bytes(self, token_id):
        return bytes([token_id])

    def special_token(self, token_id):
        return "</s>" if token_id == 0 else None

    def detokenizer(self, behind=(), special=False):
        return ByteDecoder()


class ByteDecoder:
    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids):
        return self.decoder.decode(bytes(i for i in token_ids if i))

    def finish(self):
        return self.decoder.decode(b"", final=True)


@dataclass
class Running:
    """A server and a client of it."""

    client: aiohttp.ClientSession
    url: str
    scheduler: Scheduler
    engine: AsyncEngine

    async def post(self, path, body):
        """Status, headers and the body's bytes."""
        async with self.client.post(path, json=body) as response:
            return response.status, response.headers, await response.read()

    async def until(self, condition):
        """Wait for something that is bound to happen."""
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def running(*, executor=None, codec=None, max_body_bytes=2**20, extend=None, app_options=None, **settings):
    settings = {"num_blocks": 256, "max_model_len": 512} | settings
    config = SchedulerConfig(**settings)
    scheduler = Scheduler(config)
    executor = executor or SimulatedExecutor(ConstantStep(0.0005))
    async with AsyncEngine(scheduler, executor) as engine:
        app = build_app(
            engine,
            codec or PlainTokenizer(),
            model_name="toy",
            max_model_len=config.max_model_len,
            max_body_bytes=max_body_bytes,
            **(app_options or {}),
        )
        if extend is not None:
            extend(app)
        async with (
            listening(app, port=0, shutdown_timeout_s=1) as where,
            aiohttp.ClientSession(where.url, timeout=aiohttp.ClientTimeout(300)) as client,
        ):
            yield Running(client, where.url, scheduler, engine)


@pytest.fixture
def serve_toy():
    """`async with serve_toy(...) as server`: a model called toy."""
    return running


@pytest.fixture
def scripted():
    """Makes an executor that gives the tokens it is told to."""
    return ScriptedExecutor


@pytest.fixture
def byte_codec():
    return ByteCodec()


@pytest.fixture
def slow_steps():
    """An executor whose steps take 20 ms each, so that something can happen between them."""
    return SimulatedExecutor(ConstantStep(0.02))
