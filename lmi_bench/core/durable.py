"""Reads a user's files, writes files that a kill leaves whole or absent, and locks a folder."""

import csv
import fcntl
import io
import json
import mmap
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from lmi_bench.core.errors import InputError, file_reason

LOCK = ".lock"
_LONE_SURROGATE = re.compile(r"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]\w\w")
_MOST_BYTES, _MOST_OF_A_DEVICE = 2**30, 2**20  # ShareGPT has 642 MiB; /dev/zero has no end
UNFINISHED = ".new"  # how the name of a file ends that is being written


def lock_folder(path: Path) -> int:
    """Lock the folder until `close` or the end of the process, even if it is killed."""
    fd = open_plain(path / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise InputError(
            f"another sweep (process {holder}) is writing {path}: wait for it, or use another --out"
        ) from exc
    with suppress(OSError):  # a full disk: the lock holds without the name of its process
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def is_locked(path: Path) -> bool:
    """Whether a process is writing the folder."""
    try:
        with open(path / LOCK, "rb", opener=open_plain) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as exc:
        return isinstance(exc, BlockingIOError)
    return False


def read_text(path: Path) -> str:
    """The text of a user's file; raises InputError for one that cannot be read."""
    try:
        most, data = _MOST_OF_A_DEVICE if path.is_char_device() else _MOST_BYTES, bytearray()
        with path.open("rb") as file:
            while len(data) <= most and (part := file.read(2**20)):
                data += part
        if len(data) > most:
            raise InputError(f"cannot read {path}: it goes on after the first {most >> 20:,} MiB")
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as exc:  # an impossible name, or no UTF-8
        raise InputError(f"cannot read {path}: {file_reason(exc)}") from exc


def whole_characters(text: str) -> str:
    """The JSON text with U+FFFD for each half of a surrogate pair, which no file can hold."""
    return _LONE_SURROGATE.sub(r"\\ufffd", text) if r"\ud" in text or r"\uD" in text else text


def parsed_json(text: str) -> Any:
    """The value of a JSON text; numbers of more than 64 bits are floats, as JavaScript has them.

    Python's own parser takes NaN, and Infinity, which SGLang writes. Raises ValueError.
    """
    try:
        return orjson.loads(text)
    except ValueError:
        is_short = re.compile(r"-?\d{1,18}").fullmatch
        try:
            return json.loads(
                whole_characters(text), parse_int=lambda digits: int(digits) if is_short(digits) else float(digits)
            )
        except RecursionError:
            raise ValueError("it is nested too deep") from None


def json_values(text: str, source: object) -> list[Any]:
    """The values in JSON lines, in a JSON list, or the one of a JSON document.

    Raises InputError for other text.
    """
    place = ""
    try:
        try:
            content = parsed_json(text)
        except ValueError:
            if text.lstrip().startswith("["):
                raise
            content = []
            for number, line in enumerate(text.splitlines(), start=1):
                place = f"line {number} of "
                content += [parsed_json(line)] if line.strip() else []
    except ValueError as exc:
        raise InputError(f"{place}{source} is neither JSON lines nor JSON: {exc}") from exc
    return content if isinstance(content, list) else [content]


def parsed_yaml(text: str, source: object) -> Any:
    """The content of a YAML text; raises InputError if it is not YAML, or has a 13th month."""
    import yaml  # most commands read none

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise InputError(f"{source} is not YAML: {' '.join(str(exc).split())}") from exc


def table_rows(text: str, source: object) -> list[dict[str, Any]]:
    """The rows of a CSV, missing cells empty; raises InputError if it is none or has huge cells."""
    try:
        return list(csv.DictReader(io.StringIO(text, newline=""), restval=""))
    except csv.Error as exc:
        raise InputError(f"{source} is not CSV: {exc}") from exc


def append_and_sync(path: Path, data: bytes) -> None:
    """Append and wait until the bytes are on the disk."""
    with open(path, "ab", opener=open_plain) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_plain(path: str | Path, flags: int) -> int:
    """Open a file of lmi-bench's own; raises InputError for a symbolic link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError:
        check_plain(Path(path))
        raise


def check_plain(*paths: Path) -> None:
    """Raise InputError for a symbolic link: what the program names itself leads nowhere else."""
    if link := next((path for path in paths if path.is_symlink()), None):
        raise InputError(f"{link} is a symbolic link: remove it, or put a plain file in its place")


def write_whole(path: Path, content: Any) -> None:
    """Replace a file at once, so that a reader sees the old or the new one.

    Raises OSError if it cannot be written; the old one is then unchanged.
    """
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def drop_torn_tail(path: Path) -> None:
    """Cut off an incomplete last line, which a kill during a write leaves behind."""
    with open(path, "r+b", opener=lambda at, flags: open_plain(at, flags | os.O_CREAT)) as file:
        size = whole = file.seek(0, os.SEEK_END)
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                whole = content.rfind(b"\n") + 1
        if whole < size:
            file.truncate(whole)
            os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a file at once, making its folder; a failure leaves the old one unchanged.

    A device or a pipe is written to as it is, a link leads to the file that is written.

    Raises InputError if the path cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            write_inside(path.resolve() if path.is_symlink() else path, text)
    except OSError as exc:
        raise InputError(f"cannot write {path}: {exc.strerror}") from exc


def write_inside(path: Path, content: str | bytes) -> None:
    """As `write_text`, for a file that the program names itself: a link in its place is refused."""
    check_plain(path)
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as exc:
        raise InputError(f"cannot write {path}: {exc.strerror}") from exc


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content at once; a failure leaves the old one unchanged."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)  # half a file would use up scarce disk space
        raise
