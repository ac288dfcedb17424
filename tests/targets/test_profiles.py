"""The engine that is planned for: today's by default, and none that cannot serve the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import lmi_bench
from lmi_bench.analysis.fit.from_run import prior_for_run
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.manifest import Manifest, TargetFacts
from lmi_bench.core.scenario import EngineSection
from lmi_bench.targets.profiles import find_profile
from lmi_bench.targets.simulated import open_simulated_engine

LENGTHS = {"input_tokens": 256, "output_tokens": 64}


def run_of(**target):
    return SimpleNamespace(manifest=Manifest(target=TargetFacts(**target)))


def test_the_default_is_vllm_and_that_of_tgi_its_own():
    assert find_profile(None).name == "vLLM"
    assert find_profile("tgi-2023") == TGI_2023


@pytest.mark.parametrize(
    ("target", "label"),
    [
        ({"kind": "http", "server": "vllm 0.11.1"}, "vLLM 0.11.1"),
        ({"kind": "http", "server": "vllm"}, "vLLM 0.12 to 0.19"),
        ({"kind": "http", "server": "sglang 0.5.6"}, "SGLang 0.5.6"),
        ({"kind": "http", "server": "TGI 3.3.6"}, "TGI 3.3.6"),
        ({"kind": "http", "server": "TGI 1.4.0"}, "TGI 1.4.0"),
        ({"kind": "http", "server": "an OpenAI-compatible server"}, "vLLM 0.12 to 0.19"),
        ({"kind": "sagemaker"}, "vLLM 0.12 to 0.19"),
        ({"kind": "simulated", "profile": "TGI 1.x (2023)"}, "TGI 1.x (2023)"),
    ],
)
def test_a_run_is_fitted_from_the_engine_that_its_server_names(target, label):
    prior = prior_for_run(run_of(**target), ())
    assert prior.label == label
    has_graphs = prior.parameters.host_per_layer_s < 1e-4
    assert has_graphs == ("1." not in label[:6])


@pytest.mark.parametrize(
    ("model", "profile", "instance", "reason"),
    [
        ("gpt-oss-20b", "tgi-2023", "ml.g6e.xlarge", r"does not load gpt-oss-20b \(GptOssForC"),
        ("gemma-3-4b", "tgi-2023", "ml.g5.2xlarge", "does not load gemma-3-4b"),
        ("llama-2-7b", None, "ml.p3.2xlarge", "needs compute capability 7.5, V100 has 7"),
        ("llama-2-7b", "vllm-0.19", "ml.inf2.xlarge", r"does not run on Inferentia2 \(aws\)"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused(model, profile, instance, reason):
    with pytest.raises(InputError, match=reason):
        lmi_bench.predict(model=model, instance=instance, profile=profile, rate="1", **LENGTHS)


def test_a_format_and_a_model_that_the_engine_does_not_load_are_one_refusal():
    with pytest.raises(InputError, match=r"TGI 1.x .* does not load weights in float8"):
        lmi_bench.recommend(model="llama-3-8b", profile="tgi-2023", dtype="float8", **LENGTHS)
    with pytest.raises(InputError, match=r"does not load qwen3-8b .*--profile vllm"):
        lmi_bench.recommend(model="qwen3-8b", profile="tgi-2023", rate=1.0, **LENGTHS)


@pytest.mark.parametrize(
    ("model", "instance", "degree"), [("llama-3-70b", "ml.p5.48xlarge", 2), ("llama-2-7b", "ml.g5.12xlarge", 1)]
)
def test_without_a_degree_the_smallest_that_fits_is_taken(model, instance, degree):
    engine = open_simulated_engine(model, instance, EngineSection(), max_total_tokens=512)
    assert engine.tensor_parallel == degree
    found = lmi_bench.predict(model=model, instance=instance, rate="1", **LENGTHS)
    assert found.setup.tensor_parallel == degree


def test_a_degree_that_is_too_small_is_refused_with_those_that_fit():
    settings = EngineSection(tensor_parallel=1)
    with pytest.raises(CapacityError, match="--tp 2, --tp 4, --tp 8 would fit"):
        open_simulated_engine("llama-3-70b", "ml.p5.48xlarge", settings, max_total_tokens=512)
