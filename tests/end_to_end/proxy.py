"""An HTTP proxy in a process of its own, which opens tunnels (CONNECT).

    python proxy.py NAME PORT

It takes NAME for this machine's PORT and refuses every other name, wants the user `me` with the
password `pass-of-the-proxy`, and prints its own port, then each request line.
"""

from __future__ import annotations

import asyncio
import base64
import sys

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
    line, *headers = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    print(line.decode(), flush=True)
    method, target, _ = line.decode().split(" ")
    if b"Proxy-Authorization: " + WANTED not in headers:
        await refuse(writer, b"407 Proxy Authentication Required")
    elif method != "CONNECT" or target.partition(":")[0] != NAME:
        await refuse(writer, b"403 Forbidden")
    else:
        behind = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pump(reader, behind[1]), pump(behind[0], writer))


async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
