"""One connection of the streaming client: take the time first, frame the response, nothing more.

While a response comes in, each read costs one recvmsg, one tuple and the C parser that finds the
response's end; where the native receiver reads (`native_harvest`), only what may hold the end comes
here. What the bytes mean is worked out later (`http_answer`).
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns

import httptools

from lmi_bench.core.errors import TargetError, TargetErrorKind
from lmi_bench.loadgen.http import native_tls
from lmi_bench.loadgen.http.answer import Read, is_close_delimited
from lmi_bench.loadgen.http.kernel_time import SO_TIMESTAMPNS
from lmi_bench.loadgen.http.native_harvest import CLOSED, FAILED, TLS_FAILED
from lmi_bench.loadgen.http.receive import Receiver

READ_BYTES = 65536
"""Kept below 128 KiB, above which each buffer becomes a memory mapping of its own."""
MAX_ANSWER_BYTES = 256 * 2**20
"""Of any answer; a request may set a lower limit."""
_CONTROL_BYTES = 64
_MORE_FOLLOWS = frozenset((b"\n\n\r\n", b"}\n\r\n"))
"""Last bytes of a read that end a chunk of events, not a response: that of a chunked one ends with
an empty line, CR LF CR LF."""

Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | str]
"""Family, and (IP address, port; flow and zone) or the path of a Unix socket."""


def is_here(address: Address) -> bool:
    """Whether an address is one of this machine's."""
    family, place = address
    if isinstance(place, str):  # a path
        return True
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((place[0], 0, *place[2:]))  # only to an own one
        return True
    return False


@dataclass(slots=True)
class TlsLayer:
    """The TLS half of a connection whose socket the receiver reads."""

    session: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    ended: bool = False

    def decrypt(self, data: bytes) -> bytes:
        """Plain bytes of what came in; empty while a record is incomplete. Raises ssl.SSLError."""
        if data:
            self.incoming.write(data)
        else:
            self.incoming.write_eof()
        parts = []
        with contextlib.suppress(ssl.SSLWantReadError):
            # One read gives one record (16 KiB at most); one too many would raise, for each token.
            while not data or self.incoming.pending:
                try:
                    part = self.session.read(READ_BYTES)
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    part = b""
                if not part:
                    self.ended = True
                    break
                parts.append(part)
        return b"".join(parts)

    def encrypt(self, data: bytes) -> bytes:
        """Bytes to send for `data`."""
        self.session.write(data)
        return self.outgoing.read()


class Connection:
    """A connected socket that carries one request at a time.

    reads       what came for the present request, whole when it ended; num_bytes: their bytes
    status      of the last whole response
    sent_by_ns  when the kernel had all of the present request; 0: not yet
    connect_s   seconds to open it, the TLS handshake included; tls_s: the handshake alone
    """

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        tls: TlsLayer | None,
        connect_s: float,
        tls_s: float | None = None,
        address: Address | None = None,
    ) -> None:
        self._sock = sock
        self.address = address
        self._receiver = receiver
        self._tls = tls
        self._recvmsg = sock.recvmsg
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._unsent = b""
        self._num_fed = 0
        self._most_bytes = MAX_ANSWER_BYTES
        self._chunked = False
        self._complete = False
        self._reads: list[Read] = []
        self.num_bytes = 0
        self.fd = sock.fileno()
        self.connect_s = connect_s
        self.tls_s = tls_s
        self.status = 0
        self.sent_by_ns = 0
        self.reads: Sequence[Read] = self._reads
        self.reusable = True
        self._kept = receiver.add(self, None if tls is None else tls.session)
        self.native = self._kept is not None

    def start(self, request: bytes, *, most_bytes: int | None = None) -> tuple[int, asyncio.Future[None]]:
        """Send a request; gives the time just before it left and a future of the response's end.

        most_bytes  a longer response fails; None: as long as any may be

        The future holds a TargetError if the response fails.
        """
        self.reads = self._reads = []
        self._most_bytes = min(MAX_ANSWER_BYTES, most_bytes or MAX_ANSWER_BYTES)
        if self._kept is not None:
            self._kept.restart(self._most_bytes)
        self.num_bytes = 0
        self._num_fed = 0
        self._chunked = False
        self._complete = False
        self._parser = httptools.HttpResponseParser(self)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        data = request if self._tls is None else self._tls.encrypt(request)
        self.sent_by_ns = 0
        sent_ns = monotonic_ns()
        self._send(data)
        return sent_ns, waiter

    def close(self) -> None:
        """Close the socket; a request in flight gets no answer."""
        if self.fd >= 0:
            self.reusable = False
            self.keep_reads()
            self._receiver.remove(self)
            self._sock.close()
            self.fd = -1
            self._waiter = None

    def still_open(self) -> bool:
        """Whether it can carry another request, by a look at what came since the last harvest."""
        try:
            if self.fd >= 0 and self._sock.recv(1, socket.MSG_PEEK) and self._tls is not None:
                self.on_readable(0)  # TLS sends tickets unasked, too, and says that it ends
            else:  # its end, or bytes that nobody asked for
                self.close()
        except BlockingIOError:
            pass  # nothing came
        except OSError:
            self.close()
        return self.reusable

    # Called by the C parser of the response.
    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a chunked body: it is read the short way."""
        if name.lower() == b"transfer-encoding":
            self._chunked = value.strip().lower() == b"chunked"

    def on_message_complete(self) -> None:
        """The response is whole; an interim one (100 to 199) is followed by the real one."""
        if self._parser is not None and (status := self._parser.get_status_code()) >= 200:
            self._complete = True
            self.status = status
            whole = self.reusable and not self._unsent  # else the rest would follow in the next one
            self.reusable = whole and self._parser.should_keep_alive()

    def on_readable(self, bound_ns: int) -> None:
        """Read once; see `receive.Stream`. This is the hot path: once for every token event."""
        try:
            data, control, _, _ = self._recvmsg(READ_BYTES, _CONTROL_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._fail("broken_stream", f"the connection broke: {exc.strerror}")
            return
        now_ns = monotonic_ns()
        ended = not data
        if self._tls is not None:
            try:
                data = self._tls.decrypt(data)
            except ssl.SSLError as exc:
                self._fail("tls", f"TLS failed in mid-stream: {exc.reason}")
                return
            ended = ended or self._tls.ended
        if data:
            if self._parser is None:  # no request is waiting for it
                self.close()
                return
            reads = self._reads
            more = self._chunked and data[-4:] in _MORE_FOLLOWS and not ended
            more = more and self.num_bytes < self._most_bytes
            reads.append((now_ns, control[0][2] if control else None, data, bound_ns))
            self.num_bytes += len(data)
            if more:  # not the end: the parser gets it with the bytes that may be, in one call
                return
            if self._num_fed < len(reads) - 1:
                data = b"".join([read[2] for read in reads[self._num_fed :]])
            self._num_fed = len(reads)
            self._feed(self._parser, data)
        if ended and self.fd >= 0:
            self._end_of_stream()

    def on_woken(self, kind: int, error: int) -> None:
        """Look at what the native receiver kept; see `receive.Stream`."""
        if self._kept is None:
            return
        data = self._kept.since(self._num_fed)
        if data:
            if self._parser is None:  # no request is waiting for it
                self.close()
                return
            self.num_bytes = self._num_fed = self._num_fed + len(data)
            self._feed(self._parser, data)
            if self._chunked:
                self._kept.body_is_chunked()
        if kind == CLOSED and self.fd >= 0:
            self._end_of_stream()
        elif kind == FAILED and self.fd >= 0:
            self._fail("broken_stream", f"the connection broke: {os.strerror(error)}")
        elif kind == TLS_FAILED and self.fd >= 0:
            self._fail("tls", f"TLS failed in mid-stream: {native_tls.reason(error)}")

    def _feed(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        """Look for the response's end in bytes that the parser has not seen."""
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._fail("malformed_frame", f"not an HTTP/1.1 response: {exc}")
            return
        if self._complete:
            self._finish()
        elif self.num_bytes > self._most_bytes and (status := parser.get_status_code()) >= 300:
            self.status, self.reusable = status, False  # the message's start says enough
            self._finish()
        elif self.num_bytes > self._most_bytes:
            self._fail("malformed_frame", f"the response has more than {self._most_bytes:,} bytes")

    def give_up(self, error: TargetError) -> None:
        """Close the connection and let the request in flight fail with this."""
        waiter = self._waiter
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def keep_reads(self) -> None:
        """Have in `reads` what came so far of the present request."""
        if self._kept is not None and self._waiter is not None:
            self.num_bytes = self._kept.num_bytes
            self.reads = self._kept.reads()

    def on_writable(self) -> None:
        """Send what did not fit before; see `receive.Stream`."""
        if self.fd >= 0:
            self._receiver.want_write(self, False)
            data, self._unsent = self._unsent, b""
            self._send(data)

    def _end_of_stream(self) -> None:
        self.reusable = False
        self.keep_reads()
        if self._waiter is None:  # the server closed an idle connection
            self.close()
        elif is_close_delimited(self.reads):
            self.status = self._parser.get_status_code() if self._parser else 0
            self._finish()
        else:
            came = "before a response" if not self.reads else "in the middle of the response"
            if self.status and not self.reads:
                came += " (it had answered on it: --connections per-request uses none twice)"
            self._fail("broken_stream", f"the server closed the connection {came}")

    def _finish(self) -> None:
        self.keep_reads()
        waiter, self._waiter, self._parser = self._waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, kind: TargetErrorKind, message: str) -> None:
        self.give_up(TargetError(kind, message))

    def _send(self, data: bytes) -> None:
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except (BrokenPipeError, ConnectionResetError):  # it may have answered first, such as 413
            self.reusable = False
            return  # what there is to read says more, or that there is nothing
        except OSError as exc:
            self._fail("broken_stream", f"the request could not be sent: {exc.strerror}")
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._receiver.want_write(self, True)
        else:
            self.sent_by_ns = monotonic_ns()


async def connect(
    receiver: Receiver,
    address: Address,
    *,
    tls_context: ssl.SSLContext | None,
    host: str,
    peer: str,
    kernel_stamps: bool,
    timeout_s: float,
    tunnel: bytes = b"",
) -> Connection:
    """Open a connection, its tunnel through a proxy and its TLS handshake included.

    host    name that the certificate must have
    peer    where the address leads, for messages
    tunnel  what a proxy is sent first

    Raises TargetError of kind "connect" or "tls".
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    connected_s: float | None = None
    family, place = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if kernel_stamps:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, place)
            if tunnel:
                await _open_tunnel(sock, tunnel, f"the proxy {peer} does not lead to {host}")
            if tls_context is None:
                return Connection(sock, receiver, None, loop.time() - start_s, address=address)
            connected_s = loop.time()
            tls = await _handshake(sock, tls_context, host)
            end_s = loop.time()
        return Connection(sock, receiver, tls, end_s - start_s, end_s - connected_s, address)
    except TimeoutError as exc:
        sock.close()
        if connected_s is not None:
            late = f"the handshake was not over within {timeout_s:g} s"
            raise TargetError("tls", f"TLS with {peer} failed: {late}") from exc
        raise TargetError("connect", f"no connection to {peer} within {timeout_s:g} s") from exc
    except ssl.SSLError as exc:
        sock.close()
        detail = getattr(exc, "verify_message", None) or exc.reason or str(exc)
        raise TargetError("tls", f"TLS with {peer} failed: {detail}") from exc
    except OSError as exc:
        sock.close()
        why = os.strerror(exc.errno) if exc.errno else str(exc)  # asyncio has a message of its own
        raise TargetError("connect", f"cannot connect to {peer}: {why}") from exc
    except BaseException:
        sock.close()
        raise


async def _open_tunnel(sock: socket.socket, request: bytes, problem: str) -> None:
    """Have a proxy connect; raises TargetError if it refuses."""
    loop, reply = asyncio.get_running_loop(), b""
    await loop.sock_sendall(sock, request)
    while b"\r\n\r\n" not in reply:
        data = await loop.sock_recv(sock, READ_BYTES)
        if not data or len(reply) > READ_BYTES:
            raise TargetError("connect", f"{problem}: it closed the connection")
        reply += data
    version, _, status = reply.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    if not (version.startswith("HTTP/1.") and status.startswith("2")):
        raise TargetError("connect", f"{problem}: HTTP {status[:60]}")


async def _handshake(sock: socket.socket, context: ssl.SSLContext, host: str) -> TlsLayer:
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname=host)
    while True:
        try:
            session.do_handshake()
        except ssl.SSLWantReadError:
            await loop.sock_sendall(sock, outgoing.read())
            data = await loop.sock_recv(sock, READ_BYTES)
            if not data:
                raise ConnectionError("closed during the TLS handshake") from None
            incoming.write(data)
        else:
            await loop.sock_sendall(sock, outgoing.read())
            return TlsLayer(session, incoming, outgoing)
