"""An HTTP proxy in a process of its own, as strict as squid is by default.

    python -m tests.end_to_end.proxy NAME PORT

It takes NAME for this machine's PORT and refuses every other name, wants the user `me` with the
password `pass-of-the-proxy`, forwards plain requests, which must name the whole URL, and opens
tunnels (CONNECT) to port 443 alone. It prints its own port, then `connection` for each that it
accepts and each request line.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from urllib.parse import urlsplit

WANTED = "Basic " + base64.b64encode(b"me:pass-of-the-proxy").decode()


async def pump(reader, writer):
    """Pass all bytes on until they end."""
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def refusal(name, method, target, headers):
    """The status and the headers of an answer of the proxy itself; None: the request passes."""
    if headers.get("proxy-authorization") != WANTED:
        return "407 Proxy Authentication Required", "Proxy-Authenticate: Basic realm=here\r\n"
    parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
    if parts.hostname != name or (method == "CONNECT" and parts.port != 443):
        return "403 Forbidden", "X-Squid-Error: ERR_ACCESS_DENIED 0\r\n"
    if method != "CONNECT" and headers["host"] != parts.netloc:
        return "400 Bad Request", ""
    return None


async def serve(name, port, reader, writer):
    behind = answers = None
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *rest = head.rstrip().split("\r\n")
            print(line, flush=True)
            method, target, _ = line.split(" ")
            headers = {key.lower(): value for key, value in (each.split(": ") for each in rest)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            refused = refusal(name, method, target, headers)
            if not refused and behind is None:
                try:
                    behind = await asyncio.open_connection("127.0.0.1", port)
                except OSError:  # as a proxy without a mark of its own
                    refused = "502 Bad Gateway", "Via: 1.1 here\r\n"
            if refused:
                status, more = refused
                writer.write(f"HTTP/1.1 {status}\r\n{more}Content-Length: 0\r\n\r\n".encode())
                continue
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await asyncio.gather(pump(reader, behind[1]), pump(behind[0], writer))
                return
            if answers is None:
                answers = asyncio.create_task(pump(behind[0], writer))
            path = target.removeprefix(f"http://{headers['host']}")
            kept = [each for each in rest if not each.lower().startswith("proxy-")]
            sent = "\r\n".join([f"{method} {path} HTTP/1.1", *kept, "", ""])
            behind[1].write(sent.encode("latin-1") + body)
    finally:
        writer.close()
        if behind is not None:
            behind[1].close()
        if answers is not None:
            await answers


async def main(name, port):
    async def handle(reader, writer):
        print("connection", flush=True)
        with contextlib.suppress(OSError, EOFError):
            await serve(name, port, reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
