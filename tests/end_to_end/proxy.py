"""An HTTP proxy in a process of its own: CONNECT, and requests in absolute form.

    python proxy.py NAME PORT

It takes NAME for this machine's PORT and refuses every other name, wants the user `me` with the
password `pass-of-the-proxy`, and prints its own port, then each request line.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from urllib.parse import urlsplit

NAME, PORT = sys.argv[1], int(sys.argv[2])
WANTED = b"Basic " + base64.b64encode(b"me:pass-of-the-proxy")


async def pump(reader, writer):
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def refuse(writer, status):
    writer.write(b"HTTP/1.1 %b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
    writer.close()


async def handle(reader, writer):
    """All requests of a connection go to one connection behind, in their order."""
    behind = None
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        line, *headers = head.split(b"\r\n")
        method, target, _ = line.decode().split(" ")
        print(line.decode(), flush=True)
        host = target.partition(":")[0] if method == "CONNECT" else urlsplit(target).hostname
        if b"Proxy-Authorization: " + WANTED not in headers:
            await refuse(writer, b"407 Proxy Authentication Required")
            return
        if host != NAME:
            await refuse(writer, b"403 Forbidden")
            return
        if behind is None:
            behind = await asyncio.open_connection("127.0.0.1", PORT)
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await asyncio.gather(pump(reader, behind[1]), pump(behind[0], writer))
                return
            back = asyncio.create_task(pump(behind[0], writer))
        sent = b"%b /%b HTTP/1.1" % (method.encode(), target.split("/", 3)[3].encode())
        kept = [each for each in headers if not each.startswith(b"Proxy-")]
        length = [each for each in headers if each.lower().startswith(b"content-length:")]
        body = await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
        behind[1].write(b"\r\n".join([sent, *kept]) + body)
    if behind is not None:
        behind[1].close()
        await back


async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
