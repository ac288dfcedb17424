"""How long `lmi-bench --help` and a first simulated level take, whole process, median of several.

    python benchmarks/startup.py [--runs 9]

The floor is the interpreter itself, printed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(command: list[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start_s


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


if __name__ == "__main__":
    main()
