"""What the HTTP layer logs of its connections, without what their clients got wrong.

aiohttp answers bytes that are no HTTP, or a body that is not what its Content-Encoding says, with a
400, and logs each as an error with a traceback: on a port that others reach, scanners send them.
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
    """For `web.AppRunner`: bugs of ours, with their tracebacks, and nothing else."""
    logger = logging.getLogger(__name__)
    if not logger.filters:
        logger.addFilter(_WithoutClientsOwn())
    return logger
