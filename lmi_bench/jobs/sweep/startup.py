"""Start-up of a server, timed: from its command to its first answer, twice.

The first start is cold as far as this machine was: files that others have read lie in the page
cache. The second one is warm: weights in the page cache, compiled kernels and graphs on disk. The
second server is the one that is measured. An answer is two tokens, of the first request that works.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Listener
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.scenario import AUTO, SAGEMAKER_PREFIX, Scenario, is_endpoint
from lmi_bench.loadgen.ask.discover import discover
from lmi_bench.loadgen.ask.probe import Probe
from lmi_bench.targets.bench import Access
from lmi_bench.targets.http import open_probe

START_LIMIT_S, END_LIMIT_S = 3600.0, 15.0
_ASK_EVERY_S = 0.05
_SERVER = """
exec 3<&0
{ read -r _ <&3; trap '' TERM; kill -TERM 0; sleep 15; kill -KILL 0; } >/dev/null 2>&1 &
eval "$1" </dev/null 3<&-
"""
"""The command in a process group that ends once this program's end of the pipe is closed, be it by
a SIGKILL."""


@contextmanager
def measured_startup(command: str, scenario: Scenario, access: Access, listener: Listener) -> Iterator[dict[str, Any]]:
    """Time two starts of the server; gives the facts of both, and the second server inside.

    The server and all processes of its group are ended on every way out.

    Raises InputError for a target that is no URL or answers already, and for a command that ends,
    with its last words, or gives no answer within an hour.
    """
    if not is_endpoint(scenario.target) or scenario.target.startswith(SAGEMAKER_PREFIX):
        raise InputError("--measure-startup starts a server at a URL: name http://127.0.0.1:PORT")
    probe = open_probe(scenario, access.all_headers(scenario.protocol), listener)
    if _why_no_answer(probe, scenario) is None:
        raise InputError(f"--measure-startup: a server answers at {probe.url} already: end it")
    with _started("cold", command, probe, scenario, listener) as cold_s:
        pass
    with _started("warm", command, probe, scenario, listener) as warm_s:
        listener.note(f"start to first answer: {cold_s:.2f} s cold, {warm_s:.2f} s warm")
        facts = {"startup_cold_s": round(cold_s, 3), "startup_warm_s": round(warm_s, 3)}
        yield {**facts, "startup_command": command}  # redacted when it is written


def _why_no_answer(probe: Probe, scenario: Scenario) -> str | None:
    """None if the server answers a request for two tokens."""
    protocol, model = (None if x == AUTO else x for x in (scenario.protocol, scenario.model))
    try:
        discover(probe, protocol=protocol, model=model, stream=scenario.stream)
    except InputError as exc:  # nobody listens, it still loads, ...
        return str(exc)
    return None


@contextmanager
def _started(name: str, command: str, probe: Probe, scenario: Scenario, listener: Listener) -> Iterator[float]:
    """The command's server from its first answer to the end of the block; gives the seconds from
    the command to that answer, which are the start's progress while they pass."""
    with tempfile.TemporaryFile() as said:
        began_s = time.monotonic()
        server = subprocess.Popen(  # noqa: S603 - the user's own command
            ["/bin/sh", "-c", _SERVER, "sh", command],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            while (why := _why_no_answer(probe, scenario)) is not None:
                took_s = time.monotonic() - began_s
                listener.progress(f"{name} start of the server", took_s, None)
                if server.poll() is not None or time.monotonic() > began_s + START_LIMIT_S:
                    said.seek(0)
                    words = said.read().decode("utf-8", "replace").strip().splitlines()
                    if server.returncode is not None:
                        why = f"ended with exit code {server.returncode}"
                    last = redact_text(words[-1]) if words else "it printed nothing"
                    raise InputError(f"--measure-startup: the command {why}; its last words: {last}")
                time.sleep(_ASK_EVERY_S)
            yield time.monotonic() - began_s
        finally:
            assert server.stdin is not None
            server.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                server.wait(END_LIMIT_S)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
