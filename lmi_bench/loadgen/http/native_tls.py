"""TLS sessions of Python's `ssl` for the native receiver, which decrypts by the same OpenSSL.

Python makes the handshake and checks the certificate; only the reading is the receiver's. CPython
keeps the session's pointer to itself, so it is taken from the object's memory, after a child
process has tried once that this is the right one: a wrong one would end that process, not this.
It imports nothing of this package, so the child starts fast.
"""

import ctypes
import functools
import ssl
import subprocess
import sys

_CALLS = ("SSL_read", "SSL_get_error", "BIO_write", "ERR_peek_last_error", "ERR_clear_error")
"""The functions of `struct tls_calls` in `harvest.c`, in its order."""
_TRIAL_S = 20.0


@functools.cache
def why_not() -> str | None:
    """Why the receiver cannot decrypt here; None: it can. It can follow the word "because"."""
    try:
        words = [sys.executable, "-I", __file__]
        trial = subprocess.run(words, capture_output=True, timeout=_TRIAL_S, check=False)  # noqa: S603 - this file
    except (OSError, subprocess.SubprocessError) as exc:
        return f"TLS could not be tried: {exc}"
    return None if trial.returncode == 0 else "this Python's OpenSSL cannot be reached from C"


def addresses(session: ssl.SSLObject) -> tuple[int, int, int]:
    """Addresses of the calls, of the session, and of the memory BIO that it reads."""
    pointer = _pointer(session)
    return ctypes.addressof(_calls()), pointer, _library().SSL_get_rbio(pointer)


def reason(code: int) -> str:
    """What an error code of OpenSSL means, in the words of `ssl.SSLError.reason`."""
    words: bytes | None = _library().ERR_reason_error_string(code & 0xFFFFFFFF)
    return words.decode().upper().replace(" ", "_") if words else f"error {code & 0xFFFFFFFF:#x}"


@functools.cache
def _library() -> ctypes.PyDLL:
    """OpenSSL as `ssl` uses it. Raises OSError or AttributeError if it is out of reach."""
    library = ctypes.PyDLL(sys.modules["_ssl"].__file__)
    pointer = ctypes.c_void_p
    library.SSL_get_rbio.argtypes, library.SSL_get_rbio.restype = (pointer,), pointer
    library.SSL_get_ex_data.argtypes, library.SSL_get_ex_data.restype = (pointer, ctypes.c_int), pointer
    library.ERR_reason_error_string.argtypes = (ctypes.c_ulong,)
    library.ERR_reason_error_string.restype = ctypes.c_char_p
    return library


@functools.cache
def _calls() -> ctypes.Array[ctypes.c_void_p]:
    library = _library()
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _CALLS]
    return (ctypes.c_void_p * len(_CALLS))(*found)


def _pointer(session: ssl.SSLObject) -> int:
    """The session's `SSL *`: PySSLSocket is an object's head, its socket, then this."""
    place = id(session._sslobj) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)  # type: ignore[attr-defined]
    return ctypes.c_void_p.from_address(place).value or 0


def _is_right() -> bool:
    """Whether the pointer leads to the session that names its Python object."""
    session = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(
        ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost"
    )
    own = id(session._sslobj)  # type: ignore[attr-defined]
    return all(addresses(session)) and _library().SSL_get_ex_data(_pointer(session), 0) == own


if __name__ == "__main__":
    sys.exit(not _is_right())
