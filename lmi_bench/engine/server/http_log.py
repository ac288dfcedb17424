"""The HTTP server's log, without errors caused by clients.

aiohttp answers invalid HTTP, or a body that does not match its Content-Encoding, with a 400 and
logs each with a traceback; on a public port scanners send many of them.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_CLIENTS_OWN = (HttpProcessingError, web.RequestPayloadError)


class _WithoutClientsOwn(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        exc = record.exc_info[1] if record.exc_info else None
        return not isinstance(exc, _CLIENTS_OWN)


def connection_logger() -> logging.Logger:
    """A logger for `web.AppRunner` that reports only server bugs, with their tracebacks."""
    logger = logging.getLogger(__name__)
    if not logger.filters:
        logger.addFilter(_WithoutClientsOwn())
    return logger
