"""Prints the posts' savings figure again, by the prices of its day and by the catalog's.

python benchmarks/posts_savings.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.support.savings import saving  # noqa: E402
from lmi_bench.catalog.instances import find_instance  # noqa: E402

PUBLISHED = "79.88 % cheaper with a 1-year savings plan (post of 2024)"


def main() -> None:
    small, large = find_instance("ml.g5.12xlarge"), find_instance("ml.p4d.24xlarge")
    before = replace(
        large,
        price_usd_per_hour=37.688,
        price_region="us-east-1",
        price_date="2025-01-26, before p4d's price fell in June 2025",
    )
    print(f"published: {small.instance_type} {PUBLISHED}")
    print(f"then, on demand: {saving(small, before)}")
    print(f"now, on demand:  {saving(small, large)}")


if __name__ == "__main__":
    main()
