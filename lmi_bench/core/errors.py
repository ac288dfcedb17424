"""The errors, and the exit codes that the command line gives them.

    LmiBenchError              1  a failure that the user cannot fix
    ├── InputError             2  the user can fix it: one line, with numbers and what to do
    │   └── CapacityError         something does not fit (memory, heads, tokens)
    ├── TargetError               one request failed; a result, kept in its record
    ├── OverloadedError           the engine takes no more requests just now
    └── EngineError               the bundled engine cannot go on

The number is the exit code. A traceback is a bug in lmi-bench.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final, Literal, get_args

from lmi_bench.core.exchange import Exchange

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_SLO_MISSED = 99
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

TargetErrorKind = Literal[
    "connect",
    "tls",
    "timeout",
    "throttled",
    "overloaded",
    "client_error",
    "server_error",
    "broken_stream",
    "malformed_frame",
    "short_output",
    "cancelled",
    "refused",
]
TARGET_ERROR_KINDS: tuple[str, ...] = get_args(TargetErrorKind)


UNREADABLE: Final = (OSError, EOFError, zlib.error, UnicodeDecodeError)
"""What reading a file raises, also a compressed one or a text."""


def file_reason(exc: Exception) -> str:
    """Why a file could not be read, without the errno and the file's name."""
    if isinstance(exc, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {exc.start})"
    return getattr(exc, "strerror", None) or str(exc)


@contextmanager
def installed(what: str, instead: str = "") -> Iterator[None]:
    """Raise InputError for an import that fails, with the command that installs the package.

    what     needs the package, such as `the conversion`
    instead  what to do without it
    """
    try:
        yield
    except ImportError as exc:
        others = {"triton": "triton", "llguidance": "'lmi-bench[structured]'"}
        packages = others.get(exc.name or "", "'lmi-bench[engine]'")
        raise InputError(f"{what} needs {exc.name}: pip install {packages}{instead}") from exc


class LmiBenchError(Exception):
    """Base of every error that lmi-bench raises on purpose."""

    exit_code: ClassVar[int] = EXIT_FAILED


class InputError(LmiBenchError):
    """The input cannot be used; the message states the fault, its numbers, and what to do."""

    exit_code: ClassVar[int] = EXIT_BAD_INPUT


class CapacityError(InputError):
    """Something asked for does not fit; the message holds both numbers."""


class OverloadedError(LmiBenchError):
    """The engine refuses a request at once because its limit of waiting requests is reached."""


class EngineError(LmiBenchError):
    """The engine or its executor failed and cannot answer its requests."""


class TargetError(LmiBenchError):
    """One request got no complete answer.

    kind      the bucket in which it is counted
    exchange  what had arrived before it failed, if anything
    """

    def __init__(self, kind: TargetErrorKind, message: str, *, exchange: Exchange | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.exchange = exchange


def timeout_message(timeout_s: float, num_tokens: int) -> str:
    """Error text of a request that timed out after `num_tokens` tokens."""
    if not num_tokens:
        return f"no first token within {timeout_s:g} s"
    return f"no complete answer within {timeout_s:g} s, {num_tokens} tokens came"


def is_ctrl_c(exc: BaseException | None) -> bool:
    """Whether it is a Ctrl-C or was raised from one, as by a class that was being made."""
    while exc is not None and not isinstance(exc, KeyboardInterrupt):
        exc = exc.__cause__ or exc.__context__
    return exc is not None


def drop_frames(exc: BaseException) -> None:
    """Let go of what an exception was raised in. Where one of its frames holds it, or what the
    frames hold does, all of that would wait for a garbage collection, which a server makes rare."""
    each: BaseException | None = exc
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
