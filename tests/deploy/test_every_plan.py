"""Every model on every machine by every server: files that its rules allow, or one refusal.

The rules stand here a second time, as the engines state them. A run takes a sample of the
combinations; LMI_BENCH_WHOLE_CATALOG=1 takes all (minutes).
"""

from __future__ import annotations

import json
import os
import random
import re
from itertools import product

import pytest

from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12, VLLM_0_19
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import all_model_entries
from lmi_bench.core.errors import LmiBenchError
from lmi_bench.deploy.settings import EndpointSettings, Server, Stated
from lmi_bench.jobs.deploy import write_deployment
from lmi_bench.jobs.settings.deploy import DeploySettings

KINDS = ("lmi", "vllm", "sglang", "tgi")
FORMATS = ((None, ""), ("float16", ""), ("int4", "org/{}-AWQ"), ("int4", ""), ("float8", ""))
MODELS = [entry for entry in all_model_entries() if entry.hf_id]
MACHINES = [each for each in all_instances() if each.has_endpoints]
SAMPLE = 50
BITS = {"int4": 4, "mxfp4": 4, "float8": 8, "int8": 8, "float32": 32}  # of a weight, else 16
CUDA_SINCE = {"cu124": (7.0, 9.0), "cu126": (5.0, 9.0), "cu128": (7.0, 12.1), "cu129": (7.0, 12.1)}
OVERFLOWS = ("gemma-2", "gemma-3", "glm-4-", "plamo-2")  # vLLM's _check_valid_dtype
NAMED = {"awq": "int4", "gptq": "int4", "int4": "int4", "fp8": "float8", "mxfp4": "mxfp4"}
PUBLISHED = {
    "gpt-oss": "mxfp4",
    "deepseek-v4": "mxfp4",
    "kimi-k3": "mxfp4",
    "deepseek-v3": "float8",
    "deepseek-r1": "float8",
    "kimi-k2-instruct": "float8",
    "minimax-m2": "float8",
    "mimo-v2": "float8",
    "kimi-k2-thinking": "int4",
    "kimi-k2.5": "int4",
}
KEYS = {
    "lmi": ("OPTION_", "GPU_MEMORY_UTILIZATION", "MAX_MODEL_LEN", "TENSOR_PARALLEL_DEGREE"),
    "vllm": ("SM_VLLM_", "GPU_MEMORY_UTILIZATION", "MAX_MODEL_LEN", "TENSOR_PARALLEL_SIZE"),
    "sglang": ("SM_SGLANG_", "MEM_FRACTION_STATIC", "CONTEXT_LENGTH", "TP_SIZE"),
    "tgi": ("", "CUDA_MEMORY_FRACTION", "MAX_TOTAL_TOKENS", "SM_NUM_GPUS"),
}
"""Prefix of a server's variables, then its share of the memory, its context, its degree."""
REASONS = (
    r"does not fit|does not run on|overflows in|has no bfloat16|TGI serves|(int4|the) weights|"
    r"weights need|SageMaker puts a copy on one machine"
)


def combinations():
    """(model, machine, server, format, weights); the sample has every architecture and machine."""
    every = [
        (model, machine.instance_type, kind, *form)
        for model, machine, kind, form in product(MODELS, MACHINES, KINDS, FORMATS)
    ]
    if os.environ.get("LMI_BENCH_WHOLE_CATALOG"):
        return every
    draw = random.Random(17)
    draw.shuffle(every)
    small = [each for each in every if each[0].shape.params_total < 1.5e10]
    seen, found = set(), []
    for each in (*small[: SAMPLE // 2], *every):
        family = each[0].shape.architecture, each[2]
        if len(found) < SAMPLE // 2 or {each[1], family} - seen:
            found.append(each)
            seen |= {each[1], family}
    return found


def written(folder, entry, machine, kind, dtype, weights):
    """The variables of a deployment's container, its image, and the plan."""
    weights = weights.format(entry.hf_id.rpartition("/")[2]) or None
    if weights and any(name in entry.hf_id.lower() for name in PUBLISHED):
        weights = None
    plan, _ = write_deployment(
        DeploySettings(
            out=folder,
            model=entry.shape.name,
            instance=machine,
            stated=Stated(dtype=dtype),
            server=Server(kind, model_id=weights),
            endpoint=EndpointSettings("test", accept_eula=True),
        )
    )
    model = json.loads((folder / "sagemaker.json").read_text())[0]["parameters"]
    container = model["PrimaryContainer"]
    return container["Environment"], container["Image"], plan


def name_of_format(weights, variables):
    """The format of the weights that the server loads, by their name and its variables."""
    text = weights.lower()
    own = [kind for name, kind in PUBLISHED.items() if name in text]
    stated = [kind for name, kind in NAMED.items() if name in text]
    made = [v for k, v in variables.items() if re.search("QUANTI[SZ]", k)]
    return [*own, *stated, *(NAMED[each] for each in made), "16 bits"][0]


def check(entry, machine, kind, variables, image, plan):
    """The server's own rules."""
    device, shape = machine.accelerator, entry.shape
    prefix, share, context, degree = KEYS[kind]
    settings = {k.removeprefix(prefix): v for k, v in variables.items()}
    weights = settings.get("HF_MODEL_ID") or settings.get("MODEL") or settings.get("MODEL_PATH")
    weights = weights or variables["HF_MODEL_ID"]
    # the format of the weights is the plan's
    wanted, _, _ = plan.setup.dtype.partition("-")  # of the routed experts
    wanted = wanted if wanted in NAMED.values() else "16 bits"
    assert name_of_format(weights, settings) == wanted
    # the type is one that the architecture and the device have
    dtype = settings.get("DTYPE", "float16" if kind == "tgi" and wanted == "16 bits" else "auto")
    overflows = any(name in shape.name for name in OVERFLOWS)
    published = (None, "auto", entry.checkpoint_dtype or "float16")
    assert plan.weights.stated_dtype or wanted != "16 bits" or settings.get("DTYPE") in published
    has_bfloat16 = device.compute_capability is None or device.compute_capability >= 8.0
    half = dtype in ("fp16", "float16", "half") or (dtype == "auto" and not has_bfloat16)
    assert not (overflows and half and wanted == "16 bits")
    assert has_bfloat16 or dtype not in ("bf16", "bfloat16")
    # the format's kernels exist for the device: vLLM's get_min_capability of 0.32
    least = {"mxfp4": 8.0, "float8": 7.5}.get(wanted, 7.5 if "awq" in weights.lower() else 0.0)
    assert device.compute_capability is None or device.compute_capability >= least
    # the image runs on the machine
    assert ("neuron" in image) == (device.vendor == "aws")
    assert ("arm64" in image) == (device.host == "arm64")
    cuda = re.search(r"cu1\d\d", image)
    if cuda and device.compute_capability is not None:
        low, high = CUDA_SINCE.get(cuda[0], (7.5, 12.1) if cuda[0] >= "cu130" else (0.0, 9.0))
        assert low <= device.compute_capability <= high, image
    # one longest request fits beside the weights, by the server's arithmetic
    if share not in settings:
        assert device.vendor == "aws"
        return
    shards, tokens = int(settings[degree]), int(settings[context])
    room = float(settings[share]) * device.memory_bytes
    if kind in ("lmi", "vllm"):
        profile = min((VLLM_0_12, VLLM_0_19), key=lambda each: each.reserve_bytes)
        assert float(settings[share]) <= max(VLLM_0_12.memory_share, VLLM_0_19.memory_share)
        room -= profile.reserve_bytes
    values = shape.latent_kv_dim or 2 * shape.head_dim * max(1, shape.num_kv_heads // shards)
    layers = shape.num_layers - shape.cacheless_layers
    full = layers if shape.full_attention_layers is None else shape.full_attention_layers
    if shape.sliding_window is None:
        full = layers
    window = min(tokens, shape.sliding_window or tokens)
    kept = full * tokens + (layers - full) * window
    loaded = shape.params_total * BITS.get(wanted, 16) / 8 / shards
    assert loaded + 2 * (values + shape.index_values) * kept <= room


def test_every_plan_is_written_by_the_servers_rules_or_refused_in_words(tmp_path):
    wrong, outcomes = [], []
    for number, (entry, name, kind, dtype, weights) in enumerate(combinations()):
        case = f"{entry.shape.name} {dtype} {weights} on {name}, {kind}"
        try:
            made = written(tmp_path / str(number), entry, name, kind, dtype, weights)
        except LmiBenchError as refusal:
            outcomes.append(0)
            if not re.search(REASONS, str(refusal)):
                wrong.append(f"{case}: {refusal}")
            continue
        outcomes.append(1)
        try:
            check(entry, find_instance(name), kind, *made)
        except AssertionError as broken:
            wrong.append(f"{case}: {str(broken).splitlines()[0]}")
    assert wrong == []
    assert 0.2 < sum(outcomes) / len(outcomes) < 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_model_on_a_usual_machine_is_never_refused(kind, tmp_path):
    entry = next(each for each in MODELS if each.shape.name == "qwen3-8b")
    made = written(tmp_path / "files", entry, "ml.g6e.xlarge", kind, None, "")
    check(entry, find_instance("ml.g6e.xlarge"), kind, *made)
