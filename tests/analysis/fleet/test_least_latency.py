"""Least latency: one request at a time, on as many devices as make it faster.

The published tables have Llama 2 7B alone at 17 ms a token on the four devices of ml.g5.12xlarge,
at 33 on one of them, and at 17 on ml.p4d.24xlarge.
"""

from lmi_bench.jobs.recommend import recommend
from lmi_bench.jobs.settings.recommend import RecommendSettings


def _least(*instances: str):
    settings = RecommendSettings(
        model="llama-2-7b",
        input_tokens=256,
        output_tokens=256,
        objective="latency",
        profile="tgi-2023",
        instance=instances,
    )
    return recommend(settings).answer.recommended


def test_four_devices_answer_a_lone_request_in_half_the_time_of_one():
    best = _least("ml.g5.12xlarge")
    assert (best.tensor_parallel, best.copies) == (4, 1)
    figure = best.figures["latency_per_token_p90_ms"]
    assert figure.low <= 17 <= figure.high


def test_of_machines_that_are_equally_fast_the_cheapest_is_named():
    assert _least("ml.p4d.24xlarge", "ml.g5.12xlarge", "ml.g5.2xlarge").instance == "ml.g5.12xlarge"
