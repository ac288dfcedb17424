"""How long `lmi-bench --help` and a first simulated level take, and the first request to a URL.

    python benchmarks/startup.py [--runs 9]

Whole processes, medians of several; the floor is the interpreter itself, printed beside them. The
first request for tokens is timed where it reaches the truth server, from the start of the process
on; once more with an empty cache, so that the native receiver has to be built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SERVER = Path(__file__).parent / "support" / "truth_server.py"
PORT = 18413


def seconds(command: list[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start_s


def call(path: str, method: str = "GET") -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", method=method)
    if method == "POST":
        request.data = b"{}"
    with urllib.request.urlopen(request, timeout=5) as reply:
        return json.load(reply)


def first_request_s(cache: Path, out: Path) -> float:
    """Seconds from the start of `sweep URL` to the arrival of its first request for tokens."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    start_ns = time.monotonic_ns()
    args = f"sweep http://127.0.0.1:{PORT} --concurrency 1 --requests-per-level 1 --osl 4".split()
    args += ["--isl", "8", "--out", str(out)]
    call("/truth/reset", "POST")
    subprocess.run([sys.executable, "-m", "lmi_bench", *args], check=True, capture_output=True, env=environment)
    return (call("/truth/stats")["t_first_recv_ns"] - start_ns) / 1e9


def first_requests(runs: int, folder: Path) -> None:
    """Print the time to the first request with a warm and with an empty cache."""
    command = [sys.executable, SERVER, "--port", str(PORT), "--ttft-ms", "5", "--itl-ms", "1"]
    server = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                call("/truth/reset", "POST")
                break
            time.sleep(0.05)
        first_request_s(folder / "warm", folder / "first")
        for name, cache in (("first request to a URL", "warm"), ("the same, empty cache", "{}")):
            times = [first_request_s(folder / cache.format(i), folder / f"{cache}-{i}") for i in range(runs)]
            spread = f"{min(times):.2f} to {max(times):.2f}"
            print(f"{name:<22} {statistics.median(times):.2f} s  ({spread}, {runs} runs)")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        number = iter(range(10_000))

        def level() -> list[str]:
            out = Path(folder) / str(next(number))
            args = "sweep --target sim:ml.g5.2xlarge --model llama-2-7b --concurrency 1"
            return [sys.executable, "-m", "lmi_bench", *args.split(), "--out", str(out)]

        cases = {
            "python -c pass": lambda: [sys.executable, "-c", "pass"],
            "lmi-bench --help": lambda: [sys.executable, "-m", "lmi_bench", "--help"],
            "one simulated level": level,
        }
        for make in cases.values():
            seconds(make())
        for name, make in cases.items():
            times = [seconds(make()) for _ in range(runs)]
            spread = f"{min(times):.2f} to {max(times):.2f}"
            print(f"{name:<22} {statistics.median(times):.2f} s  ({spread}, {runs} runs)")
        first_requests(runs, Path(folder))


if __name__ == "__main__":
    main()
