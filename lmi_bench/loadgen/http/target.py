"""An endpoint over HTTP/1.1: own sockets, connections opened ahead, answers decoded later.

Times are the kernel's receive times where the host has them. Nothing is retried; a connection that
failed or timed out is closed, and the next request opens another.
"""

import asyncio
import contextlib
import functools
import itertools
import resource
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Literal

from lmi_bench.core.clock import is_virtual
from lmi_bench.core.errors import InputError, TargetError, timeout_message
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.adapters import AdapterDraw
from lmi_bench.loadgen.http.answer import NS_PER_S, KernelTime, Received, decode_answer
from lmi_bench.loadgen.http.connection import Address, Connection, connect, is_here
from lmi_bench.loadgen.http.endpoint import header_lines, parse_endpoint, request_head
from lmi_bench.loadgen.http.kernel_time import SAMPLE_EVERY_S, KernelClock, stamping_socket
from lmi_bench.loadgen.http.outcome import UndecodedAnswer, cancelled
from lmi_bench.loadgen.http.receive import priority_asked, receiver_of
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.http.tls import client_context
from lmi_bench.wire.embeddings import EmbeddingsFormat
from lmi_bench.wire.event import WireFormat

SPACING_S = 0.0004
"""Seconds between the first sends of neighbouring users. If hundreds are sent at once, they wait
for each other in the server's accept and read queues, which says nothing about the model."""
MAX_UNDECODED_BYTES = 256 * 2**20
"""Most bytes of answers kept undecoded during a level; more are decoded as they end."""
LEAST_ANSWER_BYTES, ANSWER_BYTES_A_TOKEN, VECTOR_BYTES = 64 * 2**10, 4 * 2**10, 4 * 2**20
"""Maximum size of an answer, or of one that is a vector: a token with its framing takes 200 to 600
bytes, with 20 log-probs up to 4,000. An endless answer would fill this machine's memory."""
USER_TIME_TICK_S = 0.00025
"""How often the receiver looks for data by user time: it bounds how late an idle loop reads, for
about 2 % of a core."""
_CONNECTS_AT_ONCE = 64
SPARE_DESCRIPTORS = 64

Timestamps = Literal["kernel", "user"]


@dataclass(eq=False, repr=False)  # its headers may have a key
class HttpTarget(contextlib.AbstractAsyncContextManager["HttpTarget"]):
    """One endpoint, one protocol. Use it as an async context manager or `close` it.

    stream      False requests answers in one piece
    sign        gives a body's own headers, such as its signature, just before it is sent
    timestamps  "kernel" insists on the kernel's receive time, "user" does without; None takes
                the kernel's if the host has it
    connections "reuse": one for each request in flight, reused; "per-request": a new one for each;
                a number: the limit, above which requests wait
    first_token_timeout_s  a request fails if no token came by then; None: no such limit
    count_tokens  counts the tokens of an answer's text if the server does not report them; None:
                events are counted
    native      library of the native receiver (`native_harvest.choose_receive`), which reads the
                connections without TLS; None: Python reads
    adapters    shares of the model's adapters by name, drawn by `seed`; None: the model itself
    cacert, insecure  certificates to accept (`tls.client_context`)
    priority    of the receiving thread, in a level; None: realtime for another machine's endpoint
    session_header  header in which every turn of a conversation sends the conversation's id
    """

    url: str
    wire_format: WireFormat
    _: KW_ONLY
    model: str
    headers: Mapping[str, str] | None = None
    stream: bool = True
    sign: Callable[[bytes], Mapping[str, str]] | None = None
    connect_timeout_s: float = 10.0
    timestamps: Timestamps | None = None
    cacert: str | None = None
    insecure: bool = False
    connections: Literal["reuse", "per-request"] | int = "reuse"
    first_token_timeout_s: float | None = None
    native: Path | None = None
    count_tokens: Callable[[str], int] | None = None
    adapters: Mapping[str, float] | None = None
    seed: int = 0
    session_header: str | None = None
    priority: Literal["normal", "realtime"] | None = None

    def __post_init__(self) -> None:
        self.endpoint = parse_endpoint(self.url, self.wire_format)
        self._head = request_head(self.endpoint, self.headers or {})
        self._tls_context: ssl.SSLContext | None = None
        if self.endpoint.scheme == "https":
            self._tls_context = client_context(self.cacert, insecure=self.insecure)
        user_time = self.timestamps == "user" or self.endpoint.unix is not None
        self._stamping = None if user_time else stamping_socket()
        if self.timestamps == "kernel" and self._stamping is None:
            what = "a Unix socket" if self.endpoint.unix else "this host"
            raise InputError(f"{what} gives no kernel receive times: use --timestamps user")
        self._receive_time: Timestamps = "user" if self._stamping is None else "kernel"
        self._clock = KernelClock()
        self._sampler: asyncio.TimerHandle | None = None
        self._look_up = asyncio.Lock()
        self._found: list[Address] = []
        self._connect_to = self._ask = itertools.cycle(self._found)
        self._adapter_of = AdapterDraw(self.adapters, self.seed) if self.adapters else None
        self._session_ids = secrets.token_hex(8)
        limit = self.max_connections
        self._gate = None if limit is None else asyncio.Semaphore(limit)
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._signals = ReceiveSignals(self._receive_time)
        self._undecoded_bytes = 0
        self._receiver = ""
        self._raised = contextlib.ExitStack()

    @property
    def max_connections(self) -> int | None:
        """Maximum requests in flight; None: no limit."""
        return self.connections if isinstance(self.connections, int) else None

    async def open(self, connections: int) -> None:
        """Open connections until this many are idle, handshakes done.

        Requests record failures to connect, not this method. Raises InputError if the process may
        not open that many.
        """
        _refuse_virtual_time()
        if isinstance(self.connections, int):
            connections = min(connections, self.connections)
        _allow_descriptors(connections)
        with contextlib.suppress(TargetError):
            await self._addresses()  # once, not by each connection
        if self.connections == "per-request":
            return
        self._idle = [connection for connection in self._idle if connection.still_open()]
        missing = connections - len(self._idle)
        gate = asyncio.Semaphore(_CONNECTS_AT_ONCE)

        async def one() -> None:
            async with gate:
                with contextlib.suppress(TargetError):
                    self._idle.append(await self._connect())

        async with asyncio.TaskGroup() as group:
            for _ in range(missing):
                group.create_task(one())

    async def open_level(self, connections: int) -> None:
        """Prepare for a level: connections open, signals empty."""
        self._signals = ReceiveSignals(self._receive_time, models=self._signals.models)
        self._undecoded_bytes = 0
        self._session_ids = secrets.token_hex(8)  # no conversation of another level, no other run's
        await self.open(connections)
        self._raised.close()
        is_remote = bool(self._found) and not any(map(is_here, self._found))
        wanted = is_remote if self.priority is None else self.priority == "realtime"
        self._signals.priority = self._raised.enter_context(priority_asked(wanted))
        self._clock = KernelClock()
        tick_s = USER_TIME_TICK_S if self._receive_time == "user" else None
        receiver_of(asyncio.get_running_loop()).look_every(tick_s)
        self._sample_clock()

    def end_level(self) -> ReceiveSignals:
        """Observations of the receiver since `open_level`."""
        self._signals.clock_steps = self._clock.steps
        self._signals.receiver = self._receiver
        self._raised.close()
        return self._signals

    async def send(self, request: PlannedRequest) -> Exchange:
        """Send one request and return its exchange, decoded. Raises TargetError."""
        return self._decode(await self._respond(request))

    async def send_undecoded(self, request: PlannedRequest) -> UndecodedAnswer:
        """Send one request; its answer is decoded when the exchange is needed.

        A possible failure is decoded at once, so that it counts while the level runs. Raises
        TargetError.
        """
        response = await self._respond(request)
        kept_bytes = self._undecoded_bytes + response.num_bytes
        if kept_bytes > MAX_UNDECODED_BYTES or response.looks_failed:
            exchange = self._decode(response)
            return UndecodedAnswer(exchange.last_s, len(exchange.token_times_s), lambda: exchange)
        self._undecoded_bytes = kept_bytes
        user_ns, control, _, _ = response.reads[-1]
        kernel_time = self._kernel_time(user_ns)
        kernel_ns = None if kernel_time is None else kernel_time(control, user_ns)
        return UndecodedAnswer(
            ended_s=(user_ns if kernel_ns is None else kernel_ns) / NS_PER_S,
            num_events=len(response.reads),
            decode=functools.partial(self._decode_kept, response),
        )

    async def close(self) -> None:
        """Close every connection."""
        self._raised.close()
        if self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None
        for connection in list(self._open):
            connection.close()
        self._open.clear()
        self._idle.clear()
        if self._stamping is not None:
            self._stamping.close()
            self._stamping = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _respond(self, request: PlannedRequest) -> Received:
        if self._gate is None:
            return await self._respond_now(request, 0.0)
        loop = asyncio.get_running_loop()
        asked_s, waits = loop.time(), self._gate.locked()
        async with self._gate:
            return await self._respond_now(request, loop.time() - asked_s if waits else 0.0)

    async def _respond_now(self, request: PlannedRequest, held_s: float) -> Received:
        if self._adapter_of is not None:
            request = replace(request, adapter=self._adapter_of(request))
        model = request.adapter or self.model
        body = self.wire_format.request_body(request, model=model, stream=self.stream)
        connection, connect_s = await self._take()
        if self.connections == "per-request":
            held_s = connect_s or 0.0  # its opening was asked for
        if self._sampler is None:
            self._sample_clock()
        head = self._head if self.sign is None else self._head + header_lines(self.sign(body))
        if self.session_header is not None and request.session is not None:
            session_id = f"{self._session_ids}-{request.session}"
            head += header_lines({self.session_header: session_id})
        message = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        most_bytes = LEAST_ANSWER_BYTES + ANSWER_BYTES_A_TOKEN * request.output_tokens
        if self.wire_format.name == EmbeddingsFormat.name:
            most_bytes += VECTOR_BYTES
        sent_ns, ended = connection.start(message, most_bytes=most_bytes)

        def response() -> Received:
            tls_s = None if connect_s is None else connection.tls_s
            return Received(
                connection.reads,
                connection.status,
                connection.num_bytes,
                sent_ns,
                connection.sent_by_ns,
                connect_s,
                tls_s,
                held_s,
                request.adapter,
            )

        deadline = self._watch_first_token(connection, response)
        try:
            await ended
        except asyncio.CancelledError as exc:
            self._drop(connection)
            raise cancelled(self._decode(response(), whole=False)) from exc
        except TargetError as exc:
            self._drop(connection)
            exc.exchange = self._decode(response(), whole=False)
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
        if connection.reusable and self.connections != "per-request":
            self._idle.append(connection)
        else:
            self._drop(connection)
        return response()

    def _watch_first_token(
        self, connection: Connection, response: Callable[[], Received]
    ) -> asyncio.TimerHandle | None:
        """Fail the request if no token comes in time."""
        limit_s = self.first_token_timeout_s
        if limit_s is None:
            return None

        def look() -> None:
            connection.keep_reads()
            came = self._decode(response(), whole=False, signals=ReceiveSignals())
            if not came.token_times_s:
                connection.give_up(TargetError("timeout", timeout_message(limit_s, 0)))

        return asyncio.get_running_loop().call_later(limit_s, look)

    async def _take(self) -> tuple[Connection, float | None]:
        """An idle connection that is still open; or a new one, and the seconds to open it."""
        while self._idle:
            connection = self._idle.pop(self._next_idle())
            if connection.still_open():
                return connection, None
            self._open.discard(connection)
        _refuse_virtual_time()
        connection = await self._connect()
        return connection, connection.connect_s

    async def _connect(self) -> Connection:
        receiver = receiver_of(asyncio.get_running_loop())
        if self.native is not None:
            receiver.use_native(self.native)
        connection = await connect(
            receiver,
            next(await self._addresses()),
            tls_context=self._tls_context,
            host=self.endpoint.host,
            peer=self.endpoint.peer,
            tunnel=self.endpoint.tunnel,
            kernel_stamps=self._receive_time == "kernel",
            timeout_s=self.connect_timeout_s,
        )
        self._open.add(connection)
        self._receiver = "native" if connection.native else "python"
        self._signals.connect_s.append(connection.connect_s)
        if connection.tls_s is not None:
            self._signals.tls_s.append(connection.tls_s)
        return connection

    def _next_idle(self) -> int:
        """Index of the idle connection to use: the last one that was freed.

        Several addresses are used in turn; otherwise few requests at once would all go to the first
        one.
        """
        if len(self._found) < 2:
            return -1
        address = next(self._ask)
        places = range(len(self._idle) - 1, -1, -1)
        return next((i for i in places if self._idle[i].address == address), -1)

    async def _addresses(self) -> Iterator[Address]:
        """Addresses to connect to in turn, looked up once by the first connection."""
        async with self._look_up:
            if not self._found:
                self._found = await self.endpoint.addresses()
                self._connect_to, self._ask = map(itertools.cycle, (self._found, self._found))
        return self._connect_to

    def _drop(self, connection: Connection) -> None:
        connection.close()
        self._open.discard(connection)

    def _decode(self, response: Received, *, whole: bool = True, signals: ReceiveSignals | None = None) -> Exchange:
        signals, forwarder = signals or self._signals, self.endpoint.forwarder
        exchange = decode_answer(
            self.wire_format,
            response,
            kernel_time=self._kernel_time(response.reads[-1][0] if response.reads else 0),
            signals=signals,
            clock_bound_ns=self._clock.error_bound_ns,
            stream=self.stream,
            whole=whole,
            proxy=None if forwarder is None else forwarder.name,
        )
        source = "chunks" if exchange.output_tokens is None else "server"
        if source == "chunks" and self.count_tokens is not None and exchange.text:
            source = "tokenizer"
            exchange = replace(exchange, output_tokens=self.count_tokens(exchange.text))
        signals.counted_by[source] += whole
        return exchange

    def _decode_kept(self, response: Received) -> Exchange:
        try:
            return self._decode(response)
        finally:
            self._undecoded_bytes -= response.num_bytes

    def _kernel_time(self, until_ns: int) -> KernelTime | None:
        """Converts the kernel's times of reads up to this one."""
        if self._receive_time != "kernel":
            return None
        self._clock.reach(until_ns)
        return self._clock.monotonic_ns

    def _sample_clock(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
        self._clock.sample()
        loop = asyncio.get_running_loop()
        self._sampler = loop.call_later(SAMPLE_EVERY_S, self._sample_clock)


def _refuse_virtual_time() -> None:
    if is_virtual():
        raise InputError("an HTTP endpoint answers in real time: virtual time is for simulated targets only")


def _allow_descriptors(connections: int) -> None:
    """Raise the process's limit of open files if needed; InputError if that is not allowed."""
    needed = connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"{connections:,} connections need {needed:,} open files but this process may have "
            f"{hard:,}: raise the limit (ulimit -n {needed}) or lower the concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
