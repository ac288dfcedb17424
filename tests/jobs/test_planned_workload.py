"""What a plan takes from a scenario file."""

from lmi_bench.jobs.planned import read_workload


def test_a_plan_takes_model_lengths_rate_and_limits_from_a_scenario(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(
        "model: llama-2-7b\n"
        "workload: {input_tokens: 99, output_tokens: 9}\n"
        "load: {rate_per_s: 0.5}\n"
        "slo: ttft_p90<=1s\n"
    )
    read = read_workload(path)
    assert (read.model, read.rate_per_s, read.slos) == ("llama-2-7b", 0.5, ("ttft_p90<=1s",))
    assert [(each.input_tokens, each.output_tokens) for each in read.kinds] == [(99, 9)]
