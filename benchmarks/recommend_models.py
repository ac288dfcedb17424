"""Prints the fleet that is recommended for today's models, against the cheapest on any platform.

python benchmarks/recommend_models.py [--out benchmarks/results/recommend_models.md]

Each model is asked for as a user would, on SageMaker; Kimi-K2 and GLM-4.5 by facts of their
config.json alone. The ratio is the fleet's price over the cheapest priced layout that carries the
same load on SageMaker or EC2. `~` marks an estimated price.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.money import usd_text
from lmi_bench.jobs.recommend import recommend
from lmi_bench.jobs.settings.planning import PriceSettings
from lmi_bench.jobs.settings.recommend import RecommendSettings

CONFIGS = {
    "kimi-k2 (config.json)": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "glm-4.5 (config.json)": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "num_hidden_layers": 92,
        "hidden_size": 5120,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
MODELS = (
    "deepseek-r1",
    "kimi-k2 (config.json)",
    "qwen3-235b",
    "gpt-oss-120b",
    "glm-4.5 (config.json)",
    "llama-3.1-70b",
)
LOADS = ((1000, 1000, 2.0, ()), (8192, 1024, 1.0, ("itl_p90<=60ms",)))


def candidates(model: str, platform: str, load: tuple[int, int, float, tuple[str, ...]]) -> list[Candidate]:
    """Fleets for the load, the best first."""
    prompt, output, rate, slo = load
    settings = RecommendSettings(
        model=model,
        input_tokens=prompt,
        output_tokens=output,
        rate=rate,
        slo=slo,
        price_list=PriceSettings(platform=platform),
    )
    answer = recommend(settings).answer
    return list(answer.candidates) if answer.recommended is not None else []


def lines(folder: Path) -> list[str]:
    """A Markdown table for each load."""
    found = []
    for load in LOADS:
        prompt, output, rate, slo = load
        found.append(f"\n{prompt} in / {output} out, {rate:g} req/s{''.join(f', {each}' for each in slo)}\n")
        found.append("| model | fleet | USD/h | cheapest anywhere | USD/h | ratio | CPU s |")
        found.append("|---|---|---:|---|---:|---:|---:|")
        for name in MODELS:
            model = name
            if name in CONFIGS:
                path = folder / name.split()[0] / "config.json"
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
                model = str(path)
            start_s = time.process_time()
            here = candidates(model, "sagemaker", load)
            cpu_s = time.process_time() - start_s
            priced = [
                (each.price_usd_per_hour, platform, each)
                for platform, fleets in (("SageMaker", here), ("EC2", candidates(model, "ec2", load)))
                for each in fleets
                if each.price_usd_per_hour
            ]
            if not here or not priced:
                found.append(f"| {name} | none | | | | | {cpu_s:.1f} |")
                continue
            least_usd, platform, least = min(priced, key=lambda each: each[0])
            fleet, price = cell(least)
            ratio = (here[0].price_usd_per_hour or 0.0) / least_usd
            cells = (name, *cell(here[0]), f"{fleet}, {platform}", price)
            cells = (*cells, f"{ratio:.2f}", f"{cpu_s:.1f}")
            found.append(f"| {' | '.join(cells)} |")
    return found


def cell(fleet: Candidate) -> tuple[str, str]:
    """The fleet and its price, marked."""
    estimated = fleet.price_range_usd_per_hour is not None
    price = "" if fleet.price_usd_per_hour is None else usd_text(fleet.price_usd_per_hour, estimated=estimated)
    machine = fleet.instance.removeprefix("ml.")
    return f"{fleet.instances} x {machine}, TP {fleet.tensor_parallel}", price


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = "\n".join(lines(Path(folder)))
    print(text)
    if args.out is not None:
        args.out.write_text(
            f"# Fleets for today's models\n\n    python benchmarks/recommend_models.py\n{text}\n", "utf-8"
        )


if __name__ == "__main__":
    main()
