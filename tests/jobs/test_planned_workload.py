"""What a plan takes from a scenario file."""

from lmi_bench.catalog.models import find_model
from lmi_bench.core.scenario import load_scenario
from lmi_bench.jobs.planned import rate_of, workload_of


def test_a_plan_takes_model_lengths_rate_and_limits_from_a_scenario(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(
        "model: llama-2-7b\n"
        "workload: {input_tokens: 99, output_tokens: 9}\n"
        "load: {rate_per_s: 0.5}\n"
        "slo: ttft_p90<=1s\n"
    )
    read = load_scenario(path)
    assert (read.model, rate_of(read), read.slo) == ("llama-2-7b", 0.5, ("ttft_p90<=1s",))
    workload = workload_of(read, str(path), find_model(read.model), "float16")
    assert (workload.input_tokens, workload.output_tokens) == (99, 9)
