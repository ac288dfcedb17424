"""Memory of a level's token events: kept in its records, and at the peak while it is summarised.

python benchmarks/level_memory.py [--requests 40000] [--tokens 100]
"""

from __future__ import annotations

import argparse
import random
import sys
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.workload import LevelSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer, one an event")
    asked = parser.parse_args()
    chance, events = random.Random(0), asked.requests * asked.tokens
    tracemalloc.start()
    records = tuple(
        RequestRecord(i, i * 1e-3, Exchange(i * 1e-3, [i * 1e-3 + chance.random() for _ in range(asked.tokens)]))
        for i in range(asked.requests)
    )
    kept, _ = tracemalloc.get_traced_memory()
    summarise_level(LevelRun(LevelSpec(0, Load(64), num_requests=asked.requests), 0, records))
    _, peak = tracemalloc.get_traced_memory()
    print(f"{events:,} events: {kept / events:.1f} bytes each kept, {peak / events:.1f} at the peak")


if __name__ == "__main__":
    main()
