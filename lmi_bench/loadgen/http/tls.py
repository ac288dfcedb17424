"""Which server certificates the client accepts."""

import ssl
from pathlib import Path

from lmi_bench.core.errors import InputError

NOT_CHECKED = "not checked (--insecure)"


def client_context(cacert: str | None = None, *, insecure: bool = False) -> ssl.SSLContext:
    """A context that trusts the system's authorities, or SSL_CERT_FILE's.

    cacert    PEM file of the authorities to trust instead
    insecure  accept any certificate
    Raises InputError if the file holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=cacert)
    except (OSError, ssl.SSLError) as exc:
        why = "is no PEM file of certificates" if isinstance(exc, ssl.SSLError) else exc.strerror
        raise InputError(f"--cacert {Path(str(cacert))}: {why}") from exc
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
