"""Flags that a target would leave without effect are refused, and the others are not."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.targets.idle_options import refuse_idle_options

URL, SIMULATED, SAGEMAKER = "http://127.0.0.1:8000", "sim:ml.g5.2xlarge", "sagemaker:mine"


@pytest.mark.parametrize(
    ("target", "flags", "said"),
    [
        (URL, {"engine.policy": "dynamic"}, "--policy: an endpoint keeps its own"),
        (URL, {"engine.prefix_caching": True}, "--prefix-caching: an endpoint"),
        (SAGEMAKER, {"engine.threads": 2}, "--threads: a SageMaker endpoint keeps its own"),
        (SIMULATED, {"engine.threads": 2}, "--threads: a simulated engine computes nothing"),
        (SIMULATED, {"engine.backend": "torch"}, "--backend: a simulated engine computes"),
        (SIMULATED, {"client.connections": 2}, "--connections: sim:ml.g5.2xlarge runs in this"),
        ("engine", {"client.timestamps": "user"}, "--timestamps: engine runs in this process"),
        (SIMULATED, {"stream": False}, "--no-stream"),
        (URL, {"sagemaker.target_variant": "a"}, "--target-variant is for a SageMaker endpoint"),
    ],
)
def test_a_flag_without_effect_is_refused(target, flags, said):
    with pytest.raises(InputError, match=said):
        refuse_idle_options(target, flags)


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (URL, {"client.connections": 2, "stream": False, "protocol": "lmi", "engine.dtype": None}),
        (SAGEMAKER, {"sagemaker.target_variant": "a", "client.retries": "aws-standard"}),
        (SIMULATED, {"engine.num_blocks": 64, "stream": True, "client.receive": None}),
        ("engine", {"engine.threads": 2}),
        (URL, {"engine.tensor_parallel": 4, "engine.dtype": "float8"}),
    ],
)
def test_a_flag_that_the_target_knows_is_not(target, flags):
    refuse_idle_options(target, flags)
