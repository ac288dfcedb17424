"""A TLS session with both ends in this process."""

from __future__ import annotations

import contextlib
import ssl

from lmi_bench.loadgen.http.connection import TlsLayer


def tls_pair(certificate, version):
    """Both ends of a TLS session through memory; the client's one as a connection has it."""
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.maximum_version = version
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    trusting = ssl.create_default_context(cafile=cert)
    incoming = ssl.MemoryBIO()
    client = trusting.wrap_bio(incoming, to_server, server_hostname="localhost")
    for end in (client, server) * 3:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
        incoming.write(to_client.read())
    return server, to_client, TlsLayer(client, incoming, to_server)
