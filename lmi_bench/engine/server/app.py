"""Builds the HTTP application with all routes and serves it until a signal."""

import asyncio
import errno
import gc
import hmac
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from lmi_bench.core.errors import InputError
from lmi_bench.core.host import return_large_allocations
from lmi_bench.core.units import MIB
from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.replicas import ServingEngine
from lmi_bench.engine.server.codec import Codec
from lmi_bench.engine.server.failures import RefusedError, failure_middleware, without_expectations
from lmi_bench.engine.server.lmi_routes import AS_TGI, USUAL_REPLIES, LmiRoutes, Replies
from lmi_bench.engine.server.openai_routes import OpenAiRoutes
from lmi_bench.engine.server.sagemaker_routes import UNARY_TIMEOUT_S, SageMakerRoutes, SignatureCheck
from lmi_bench.engine.server.state import CLIENT, ServerState
from lmi_bench.engine.server.tgi_routes import TgiRoutes
from lmi_bench.models.hf_config import read_table

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 25 * MIB  # SageMaker's limit for a container
SHUTDOWN_TIMEOUT_S = 15.0  # SageMaker kills a container 30 s after its SIGTERM
REQUEST_TIMEOUT_S = 30.0  # of a connection's first request line and headers, and of each body
KEEP_ALIVE_S = 75.0  # from an answer to the next request's headers; load balancers close after 60
BACKLOG = 4096  # a load test connects all at once; the kernel caps it at somaxconn
_LARGE_BYTES = 4 * MIB  # such pieces (a body, its text) go back to the system when freed
_REST_S = 0.005  # in which requests that came meanwhile are answered
_LAST_PORT = 65_535
_REPORT_EVERY_S = 60.0  # of faults of one kind
_ANY_TYPE = ("/invocations", "/predictions/", "/endpoints/", "/ping")  # as SageMaker sends it
_OPEN_PATHS = ("/ping", "/health")  # which a load balancer asks without a key
_SILENT: web.AppKey[dict[Any, asyncio.TimerHandle]] = web.AppKey("silent")
"""What closes each connection that has sent no request yet."""
_IS_OPEN: web.AppKey[bool] = web.AppKey("is_open")  # to anyone, without a key
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLIENTS_OWN = (HttpProcessingError, web.RequestPayloadError)
LOGGER = logging.getLogger(__name__)
LOGGER.addFilter(  # aiohttp's reports: only the server's own faults, with their tracebacks
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_OWN))
)


@dataclass(frozen=True, slots=True)
class Listening:
    """The server's address, and a warning if it is exposed beyond this machine."""

    host: str
    port: int
    warning: str | None

    @property
    def url(self) -> str:
        """The address for a client on this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def build_app(
    engine: ServingEngine,
    codec: Codec,
    *,
    model_name: str,
    max_model_len: int,
    vocab_size: int | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    signature_check: SignatureCheck | None = None,
    replies: Replies = USUAL_REPLIES,
    chat_template: ChatTemplate | None = None,
    unary_timeout_s: float = UNARY_TIMEOUT_S,
    overhead_s: float = 0.0,
    api_key: str | None = None,
    fair_by: str | None = None,
) -> web.Application:
    """All routes over a running engine, whose context the caller enters and exits.

    vocab_size       the model's; None: the codec's
    signature_check  for requests on SageMaker's paths; None accepts unsigned requests
    replies          of the LMI routes and SageMaker's paths
    chat_template    the model's; None: a prompt is one line per message
    unary_timeout_s  timeout of SageMaker's InvokeEndpoint
    overhead_s       time that a simulated server spends on a request before the engine gets it
    api_key          that requests must have as a bearer token; None: any request is answered
    fair_by          header that names a client; None: clients do not take turns in the queue
    """

    state = ServerState(engine, codec, model_name, max_model_len, vocab_size or codec.vocab_size)
    middlewares = [failure_middleware(model_name), entrance(api_key, signature_check is not None, fair_by, overhead_s)]
    app = web.Application(client_max_size=max_body_bytes, middlewares=middlewares)
    app[_SILENT], app[_IS_OPEN] = {}, api_key is None
    lmi, openai = LmiRoutes(state, replies), OpenAiRoutes(state, chat_template)
    tgi = TgiRoutes(state)
    in_lmis_place = tgi if replies.kind == AS_TGI else None
    sagemaker = SageMakerRoutes(lmi, openai, in_lmis_place, signature_check, unary_timeout_s)
    routes = {"lmi": lmi, "openai": openai, "tgi": tgi, "sagemaker": sagemaker}
    for row in read_table("routes.csv", __package__):
        handler = getattr(routes[row["protocol"]], row["handler"])
        for method in row["methods"].split():
            app.router.add_route(method, row["path"], handler)
    return app


def entrance(api_key: str | None, signed: bool, fair_by: str | None, overhead_s: float) -> Middleware:
    """Lets in requests with the key (`signed`: or SageMaker's signature) whose body comes in time."""

    @web.middleware
    async def enter(request: web.Request, handler: Handler) -> web.StreamResponse:
        if timer := request.app[_SILENT].pop(request.protocol, None):
            timer.cancel()  # else it would keep the connection's memory until its time
        is_open = request.path in _OPEN_PATHS or (signed and request.path.startswith("/endpoints/"))
        if api_key is not None and not is_open:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            is_same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), api_key.encode())
            if scheme.lower() != "bearer" or not is_same:
                message = "the API key is missing or wrong: Authorization: Bearer KEY"
                raise RefusedError(401, message, ("WWW-Authenticate", "Bearer"))
        is_json = request.content_type.endswith("json") or request.path.startswith(_ANY_TYPE)
        if "Origin" in request.headers and request.method == "POST" and not is_json:
            raise RefusedError(415, "a web page must send Content-Type: application/json")
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                body = await request.read()  # which keeps it for the route
        except TimeoutError:
            raise RefusedError(408, f"no whole body within {REQUEST_TIMEOUT_S:g} s") from None
        if len(body) > MIB:  # to copy and to read it holds up others, but not both in one go
            await asyncio.sleep(_REST_S)
        if overhead_s and request.method == "POST":
            await asyncio.sleep(overhead_s)
        if fair_by is not None:
            CLIENT.set(request.headers.get(fair_by, ""))
        return await handler(request)

    return enter


@contextmanager
def steps_first() -> Iterator[None]:
    """The interpreter's settings under which the engine's steps wait least for the streams.

    An executor's thread gets the interpreter's lock after 0.1 ms in place of 5, and garbage
    collections, which fall between two steps as often as into one, become rare.
    """
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-4)
    gc.freeze()
    gc.set_threshold(20_000, 5, 100)  # the second generation frees closed connections: cycles
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(interval_s)


@asynccontextmanager
async def listening(
    app: web.Application, host: str = LOOPBACK, port: int = 8080, *, shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
) -> AsyncIterator[Listening]:
    """Answer requests inside the block; port 0 selects a free port.

    At the end new requests are rejected, and running ones have `shutdown_timeout_s` to finish.
    A disconnect cancels the request immediately. Raises InputError if the address cannot be used.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=shutdown_timeout_s / 2,  # aiohttp waits twice this long for a handler
        handle_signals=False,
        logger=LOGGER,
    )
    await runner.setup()
    try:
        loop, connect = asyncio.get_running_loop(), runner.server
        assert connect is not None
        connect.request_handler = without_expectations(connect.request_handler)
        silent = app.get(_SILENT)

        def connected() -> asyncio.Protocol:
            protocol = connect()
            if silent is not None:
                silent[protocol] = loop.call_later(REQUEST_TIMEOUT_S, _close_silent, protocol, silent)
            return protocol

        try:
            listener = await loop.create_server(connected, host, port, backlog=BACKLOG)
        except OSError as exc:
            raise _cannot_listen(host, port, exc) from exc
        try:
            bound_host, bound_port = listener.sockets[0].getsockname()[:2]
            warning = exposure_warning(host) if app.get(_IS_OPEN, True) else None
            with steps_first():
                yield Listening(bound_host, bound_port, warning)
        finally:
            listener.close()
    finally:
        await runner.cleanup()


def _close_silent(protocol: Any, silent: dict[Any, asyncio.TimerHandle]) -> None:
    """Close a connection whose first request has not come."""
    del silent[protocol]
    if protocol.transport is not None:
        protocol.transport.close()


async def serve(
    app: web.Application,
    host: str = LOOPBACK,
    port: int = 8080,
    *,
    on_ready: Callable[[Listening], None],
    engine: ServingEngine,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish running requests; a second signal stops at once.

    on_ready  called once, when the server accepts requests
    engine    its failure also ends the server, after its requests have been answered
    Raises EngineError if the engine failed.
    """
    return_large_allocations(_LARGE_BYTES)
    with suppress(OSError, ValueError):  # a system may grant less than its limit says
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(partial(_report_sparingly, {}))
    stop = asyncio.Event()
    watching = asyncio.ensure_future(engine.failed())
    watching.add_done_callback(lambda _: stop.set())
    async with listening(app, host, port) as where:
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, stop.set)
        try:
            on_ready(where)
            await stop.wait()
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
            watching.cancel()
    if engine.error is not None:
        raise engine.error


def _report_sparingly(due_s: dict[str, float], loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report a kind of fault once a minute: out of files, each second fails BACKLOG times."""
    exc = context.get("exception")
    kind = f"{type(exc).__name__} {context['message'].partition(' at 0x')[0]}"
    is_late = str(exc).startswith("Invalid file descriptor")  # asyncio's, of a closed listener
    if is_late or loop.time() < due_s.get(kind, 0.0):
        return
    due_s[kind] = loop.time() + _REPORT_EVERY_S
    if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        what = f"new connections wait until others end (ulimit -n: {limit:,})"
        LOGGER.error("%s: %s", exc.strerror, what)
    else:
        loop.default_exception_handler(context)


def exposure_warning(host: str) -> str | None:
    """A warning if the server is reachable from other machines, since it has no authentication."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if is_loopback:
        return None
    return (
        f"the server listens on {host}, beyond this machine, without authentication: anyone who "
        f"reaches the port can use it; --api-key asks for a key, --host {LOOPBACK} keeps it local"
    )


def check_address(host: str, port: int) -> None:
    """Raise InputError if the address cannot be bound; called before the model is loaded."""
    if not 0 <= port <= _LAST_PORT:  # name resolution would reduce it modulo 65536
        raise InputError(f"--port must be 0 to {_LAST_PORT}, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as exc:
        raise _cannot_listen(host, port, exc) from exc


def _cannot_listen(host: str, port: int, exc: OSError) -> InputError:
    reason = exc.strerror or str(exc)
    # asyncio's own text repeats the address
    if exc.errno is not None and exc.errno in errno.errorcode:
        reason = os.strerror(exc.errno)
    unknown = isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL
    flag = "--host" if unknown else "--port"
    return InputError(f"cannot listen on {host}:{port}: {reason}; choose another {flag}")
