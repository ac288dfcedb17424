"""Prints how long a recommendation over the whole catalog takes, and what it decides.

python benchmarks/recommend_speed.py
"""

from __future__ import annotations

import time

from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.slo import parse_slo

CASES: tuple[tuple[str, int, int, Load | None, tuple[str, ...]], ...] = (
    ("llama-2-7b", 256, 256, None, ()),
    ("llama-2-7b", 256, 256, Load(rate_per_s=5.0), ("ttft_p90<=1s", "itl_p50<=50ms")),
    ("llama-3-70b", 622, 250, Load(rate_per_s=5.0), ("ttft_p90<=2s", "itl_p90<=60ms")),
    ("falcon-180b", 256, 256, Load(50, think_time_s=10.0), ()),
)


def main() -> None:
    for model, input_tokens, output_tokens, load, slos in CASES:
        workload = Workload(find_model(model), "float16", input_tokens, output_tokens)
        request = RecommendRequest(
            workload, TGI_2023, slos=tuple(parse_slo(text) for text in slos), load=load
        )
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        answer = recommend(request)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        best = answer.recommended
        named = "nothing" if best is None else f"{best.instances} x {best.instance}"
        print(
            f"{model:12s} {request.describe_load():32s} {wall_s:5.1f} s wall, {cpu_s:5.1f} s CPU; "
            f"{len(answer.candidates)} candidates, {len(answer.rejected)} rejected; {named}"
        )


if __name__ == "__main__":
    main()
