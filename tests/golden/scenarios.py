"""The ten scenarios: commands that follow each other in one folder, and the files they begin with.

Small loads of simulated instances (virtual time, seeded) and few machines, so that all of it
takes about a minute. Nothing here names a module of the product.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

GPU = "sweep --target sim:ml.g5.2xlarge -m llama-2-7b --profile tgi-2023"


@dataclass(frozen=True)
class Scenario:
    """Command lines without `lmi-bench`, run in this order, and the files there before them."""

    name: str
    lines: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command line."""
        return [shlex.split(line) for line in self.lines.strip().splitlines()]


def _gateway_log() -> str:
    """Two hours of requests, as a gateway logs them."""
    draw = random.Random(5)
    rows, at = [], 1_790_000_000.0
    for number in range(400):
        at += draw.expovariate(1 / 18)
        asked = draw.choice((80, 160, 320))
        usage = {"prompt_tokens": asked, "completion_tokens": asked // 4}
        user = {"role": "user", "content": f"question {number}"}
        rows.append({"created": at, "usage": usage, "messages": [user]})
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _trace() -> str:
    """Recorded traffic of Mooncake's kind: the first block is shared by every other request."""
    rows = [
        {
            "timestamp": 400 * k,
            "input_length": 520 + 40 * (k % 3),
            "output_length": 12 + 4 * (k % 4),
            "hash_ids": [0 if k % 2 else k, 100 + k],
        }
        for k in range(24)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


PORTFOLIO = """\
models:
  - {name: chat, model: llama-2-7b, rate_per_s: 2, input_tokens: 128, output_tokens: 64,
     slo: ["ttft_p90<=2s"]}
  - {name: code, model: mistral-7b-v0.1, rate_per_s: 1, input_tokens: 64, output_tokens: 100,
     slo: ["itl_p90<=80ms"], dtype: int4}
"""

MATRIX = """\
targets:
  - {name: small, target: "sim:ml.g5.2xlarge", model: llama-3.2-1b, instance: ml.g5.2xlarge}
  - {name: large, target: "sim:ml.g6e.2xlarge", model: llama-3.2-1b, price_per_hour: 3}
payloads:
  - {name: chat, workload: {input_tokens: 64, output_tokens: 16}}
  - {name: code, workload: {input_tokens: 15, output_tokens: 30}}
defaults:
  load: {concurrency: [4], requests_per_user: 3}
  slo: ["ttft_p50<=1s"]
  engine: {profile: tgi-2023}
"""

SCENARIO = """\
name: from a file
target: sim:ml.g5.2xlarge
model: llama-2-7b
workload:
  mix:
    - {input_tokens: 20, output_tokens: 60, share: 0.5}
    - {input_tokens: 200, output_tokens: 20, share: 0.5}
load: {concurrency: [2, 8], requests_per_user: 3}
engine: {profile: tgi-2023}
seed: 11
"""

PRICES = """\
prices:
  - {instance: ml.g6e.12xlarge, usd_per_hour: 9.5, region: eu-west-1, date: 2026-11-01,
     savings_plan_usd_per_hour: 6.2}
  - {instance: ml.p4d.24xlarge, usd_per_hour: 21, region: eu-west-1, date: 2026-11-01}
"""

SCENARIOS = (
    Scenario(
        "a_listed_closed_loop_is_gated_compared_and_exported",
        f"""
{GPU} --isl 128 --osl 64 --concurrency 1,2,4,8 --requests-per-user 3 --seed 3 \
  --price-per-hour 1.5 --out rolling
{GPU} --isl 128 --osl 64 --concurrency 2,8 --requests-per-user 3 --seed 3 \
  --policy dynamic --batch-size 4 --out dynamic
compare rolling dynamic --json compared.json
gate rolling --slo "ttft_p50<=200ms" --at 4 --at 8 --junit gate.xml --markdown gate.md
gate dynamic --slo "e2e_p50<=60s" --baseline rolling --max-regression 10%
export rolling -f csv -o csv
export dynamic -f json -o json
export dynamic -f llm-d -o llm-d
report rolling dynamic --label joining --label batches --markdown page.md -o page.html
validate rolling --profile vllm-0.12 --instance ml.g5.2xlarge --json validated.json
sweep --resume --out rolling --target sim:ml.g5.2xlarge -m llama-2-7b --isl 128 --osl 64 \
  --profile tgi-2023 \
  --concurrency 1 --requests-per-user 3 --seed 4
""",
    ),
    Scenario(
        "an_open_loop_of_bursts_and_a_replayed_trace_are_reported",
        f"""
{GPU} --input-lengths "lognormal(150,60,600)" --output-lengths "uniform(10,60)" --rate 0.5,2,4 \
  --arrivals gamma --burstiness 0.5 --ramp 5 --requests-per-level 60 --slo "ttft_p90<=1s" \
  --goodput ttft:500 tpot:45 --name bursts --out bursts
{GPU} --trace trace.jsonl --speed 1,2 --prefix-caching --out trace
{GPU} --isl 128 --osl 64 --rate 2,30 --arrivals constant --max-concurrency 8 \
  --requests-per-level 40 --slo "ttft_p50<=80ms" --out capped
report bursts trace capped --markdown page.md -o page.html
""",
        {"trace.jsonl": _trace()},
    ),
    Scenario(
        "auto_levels_on_a_split_model_find_the_knee_and_the_slo",
        """
sweep --target sim:ml.g5.12xlarge -m llama-2-13b --tp 4 --isl 64 --osl 32 --concurrency auto \
  --profile tgi-2023 \
  --requests-per-user 2 --slo "latency_per_token_p90<=60ms" --price-per-hour 7.09 --out auto
report auto -o page.html
predict --model llama-2-13b --instance ml.g5.12xlarge --tp 4 --concurrency 1,8,32 --isl 64 \
  --profile tgi-2023 \
  --osl 32 --json predicted.json
""",
    ),
    Scenario(
        "a_search_finds_the_highest_rate_and_users_that_meet_the_slos",
        f"""
{GPU} --isl 128 --osl 64 --search rate --slo "ttft_p90<=1s" --slo "itl_p90<=60ms" \
  --requests-per-level 40 --out rate
{GPU} --isl 32 --osl 24 --search concurrency --slo "itl_p90<=45ms" --out users
{GPU} --isl 32 --osl 24 --search concurrency --slo "itl_p90<=5ms" --out never
report users -o page.html
""",
    ),
    Scenario(
        "mixed_lengths_batch_by_every_policy_and_a_matrix_fills_its_cells",
        """
sweep scenario.yaml --policy dynamic --batch-size 4 --max-batch-delay-ms 50 --out dynamic
sweep scenario.yaml --policy none --concurrency 1,4 --out none
sweep scenario.yaml --chunked-prefill --max-rolling-batch-size 6 --kv-layout paged --out chunked
sweep scenario.yaml --mix 30/40,300/10:3 --recompute-on-join --concurrency 4 --out mixed
sweep --matrix matrix.yaml --out matrix
""",
        {"scenario.yaml": SCENARIO, "matrix.yaml": MATRIX},
    ),
    Scenario(
        "conversations_think_share_prefixes_and_repeat",
        f"""
{GPU} --turns "uniform(2,4)" --think-time "exponential(2)" --isl 50 --osl 40 --concurrency 2,6 \
  --prefix-caching --out chats
sweep --target sim:ml.g5.12xlarge -m llama-2-7b --replicas 2 --router least-outstanding \
  --profile tgi-2023 \
  --turns 3 --think-time 1 --shared-prefix 20 --isl 64 --osl 32 --rate 1,2 --max-sessions 8 \
  --max-in-flight 4 --sessions-per-level 10 --prefix-caching --out sessions
{GPU} --isl 64 --osl 32 --shared-prefix 32 --rate 3 --repeat 3 --requests-per-level 30 \
  --out repeated
{GPU} --isl 64 --osl 32 --rate 2 --requests-per-level 30 --until "ttft_p90 +-20%" --repeat 4 \
  --out until
report chats repeated -o page.html
""",
    ),
    Scenario(
        "experts_on_eight_devices_are_swept_predicted_and_planned_for_users",
        """
sweep --target sim:ml.p4d.24xlarge -m mixtral-8x7b --tp 4 --isl 128 --osl 48 --profile vllm-0.12 \
  --concurrency 4,16 --requests-per-user 3 --chunked-prefill --out experts
predict --model mixtral-8x7b --instance ml.p4d.24xlarge --tp 4 --concurrency 4,16 --isl 128 \
  --osl 48 --profile vllm-0.12 --json predicted.json
predict --model gpt-oss-120b --instance ml.p5.48xlarge --tp 2 --rate 2 --isl 128 --osl 48 \
  --profile vllm-0.19 --json predicted-mxfp4.json
recommend --model mixtral-8x7b --isl 128 --osl 64 --users 200 --think-time 10 \
  --slo "ttft_p90<=2s" --instance ml.g6e.12xlarge,ml.p4d.24xlarge --prices prices.yaml \
  --purchase savings-plan --commit-discount 0.2 --availability az:3 --profile vllm-0.19 \
  --json plan.json
report experts --recommendation plan.json --markdown page.md -o page.html
""",
        {"prices.yaml": PRICES},
    ),
    Scenario(
        "speculation_is_swept_and_its_acceptance_planned_with",
        f"""
{GPU} --isl 100 --osl 50 --concurrency 1,4 --requests-per-user 3 \
  --draft ngram --draft-acceptance 0.6 --draft-tokens 3 \
  --out guessed
predict --model llama-2-7b --instance ml.g5.2xlarge --concurrency 1,8 --isl 100 --osl 50 \
  --profile tgi-2023 \
  --draft ngram --draft-acceptance guessed --json predicted.json
predict --model llama-2-13b --instance ml.g5.12xlarge --tp 4 --rate 0.5,2 --isl 128 --osl 64 \
  --profile tgi-2023 \
  --draft llama-2-7b --draft-acceptance 0.7 --prefix-hit 0.5 --dtype int4 \
  --json predicted-int4.json
recommend --model llama-2-7b --isl 100 --osl 50 --rate 2 --instance ml.g5.2xlarge --draft ngram \
  --profile tgi-2023 \
  --draft-acceptance guessed --slo "itl_p90<=40ms" --json plan.json
recommend --model llama-2-7b --isl 100 --osl 50 --rate 2 --instance ml.g5.2xlarge \
  --profile tgi-2023 \
  --slo "itl_p90<=1ms" --json out-of-reach.json
deploy write plan.json -o deployment --accept-eula --name chat
""",
    ),
    Scenario(
        "a_measured_machine_is_planned_verified_played_for_a_day_and_deployed",
        f"""
{GPU} --isl 128 --osl 64 --concurrency 1,16 --requests-per-user 3 --out measured
{GPU} --isl 128 --osl 64 --rate 1.5 --requests-per-level 300 --out level
calibrate measured --next 1 --instance ml.g5.2xlarge --out profile.json
recommend measured level --measured-on ml.g5.2xlarge --instance ml.g5.2xlarge,ml.g6.2xlarge \
  --profile tgi-2023 \
  --rate 4 --slo "itl_p90<=60ms" --slo "ttft_p90<=1s" --availability n+1 --explain \
  --vary rate=2..6 --json plan.json
verify plan.json --target sim:ml.g5.2xlarge --requests 60 --out replayed --json verified.json \
  --update-profile learnt.json
plan-day plan.json --shape office --peak 20 --start-up 460 --commit-discount 0.3 --json day.json
deploy write plan.json -o deployment --accept-eula --name chat --max-instances 5 \
  --target-concurrency 20
deploy write plan.json -o vllm --server vllm --accept-eula --name chat
deploy check deployment
report measured --recommendation plan.json --markdown page.md -o page.html
""",
    ),
    Scenario(
        "traffic_portfolios_settings_and_objectives_are_planned_for",
        """
workload from log.jsonl -o chat.yaml --model llama-2-7b
recommend --workload chat.yaml --model llama-2-7b --instance ml.g5.2xlarge --slo "ttft_p90<=1s" \
  --profile tgi-2023 \
  --json traffic.json
recommend --portfolio portfolio.yaml --instance ml.g5.2xlarge,ml.g5.12xlarge --json portfolio.json \
  --profile tgi-2023
recommend --profile tgi-2023 --model llama-3-8b --isl 128 --osl 64 --rate 2 --dtype float16,int4 \
  --kv-dtype float16,float8 --instance ml.g6.2xlarge --slo "itl_p90<=80ms" --json settings.json
recommend --model llama-2-7b --isl 128 --osl 64 --instance ml.g5.2xlarge,ml.g5.12xlarge --tp 1 \
  --profile tgi-2023 \
  --objective throughput --slo "latency_per_token_p90<=60ms" --json fullest.json
predict --model llama-2-7b --instance ml.g5.2xlarge --rate 0.5,2 --mix 20/100,200/20:3 \
  --profile tgi-2023 \
  --json predicted-mix.json
predict --model llama-2-7b --instance ml.g5.12xlarge --replicas 4 --router least-outstanding \
  --profile tgi-2023 \
  --rate 6 --seed 2 --input-lengths "lognormal(200,100)" --output-lengths "uniform(10,60)" \
  --json predicted-router.json
compare-accelerators --profile tgi-2023 --model llama-3-8b --isl 128 --osl 64 --top 4
deploy backends --model llama-3-8b --instance ml.g5.12xlarge
deploy limits --profile tgi-2023 --model llama-2-13b --instance ml.g5.12xlarge --rope-factor 2
report --recommendation traffic.json --recommendation settings.json -o page.html
""",
        {"log.jsonl": _gateway_log(), "portfolio.yaml": PORTFOLIO},
    ),
)
