"""Chooses an LMI backend for a model on an accelerator, with the reason for each verdict.

The rules follow the containers: which backends an image includes, which values its validators
accept, what `rolling_batch=auto` resolves to. Source: LmiConfigRecommender.java and the release
notes of djl-serving 0.26 to 0.36.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lmi_bench.catalog.instances import Instance
from lmi_bench.deploy.option_table import ERAS
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

CHOSEN, POSSIBLE, OUT = "chosen", "possible", "out"
_WITHOUT_BFLOAT16: Final = ("T4", "V100")  # below compute capability 8.0

TENSORRT_JIT_0_26: Final = (
    *("baichuan", "chatglm", "gpt2", "gptj", "internlm", "mistral", "mixtral", "qwen"),
    *("santacoder", "starcoder"),
)
"""Families that the TensorRT-LLM container compiles at start-up since version 0.26."""

_TENSORRT_BEFORE: Final = ("llama", "falcon")


@dataclass(frozen=True, slots=True)
class BackendVerdict:
    """One backend for a model on a machine. settings: the serving.properties that select it."""

    backend: str
    verdict: str
    reason: str
    settings: str


def choose_backend(shape: ModelShape, instance: Instance, era: str = "C") -> list[BackendVerdict]:
    """Every backend with its verdict, the chosen one first.

    Exactly one is chosen if any backend can serve the model on this instance.
    """
    aws = instance.accelerator.vendor == "aws"
    verdicts = [
        _vllm(instance, era, aws),
        _lmi_dist(era, aws),
        _tensorrt(shape, instance, era, aws),
        _neuronx(shape, era, aws),
        _deepspeed(era, aws),
        _tgi(aws),
        BackendVerdict(
            "Hugging Face Accelerate",
            POSSIBLE,
            "for architectures that no rolling batch supports; dynamic batching only",
            "option.rolling_batch=disable, batch_size=N",
        ),
    ]
    order = {CHOSEN: 0, POSSIBLE: 1, OUT: 2}
    return sorted(verdicts, key=lambda verdict: order[verdict.verdict])


def auto_resolves_to(instance: Instance, era: str) -> str:
    """The backend of `option.rolling_batch=auto` for a text model in LMI's general container."""
    if instance.accelerator.vendor == "aws":
        return "NeuronX" if era != "C" else "nothing: LMI has no Neuron image since 0.33"
    return {"A": "lmi-dist", "B": "lmi-dist up to 0.32, then vllm", "C": "vllm in async mode"}[era]


def _vllm(instance: Instance, era: str, aws: bool) -> BackendVerdict:
    settings = "engine=Python, option.rolling_batch=" + ("auto" if era == "C" else "vllm")
    if aws:
        return BackendVerdict(
            "vLLM",
            CHOSEN if era == "C" else OUT,
            "the current Neuron image is huggingface-vllm-inference-neuronx, outside LMI"
            if era == "C"
            else "its LMI image runs on NVIDIA GPUs only",
            "its own image" if era == "C" else "",
        )
    reason = {
        "A": "graphs on unless option.enforce_eager; auto does not choose it up to 0.26",
        "B": "auto chooses it from 0.33 on",
        "C": "auto chooses it, in async mode; the only general backend left",
    }[era]
    if instance.accelerator.name in _WITHOUT_BFLOAT16:
        reason += f"; {instance.accelerator.name} has no bfloat16: option.dtype=fp16"
    return BackendVerdict("vLLM", CHOSEN if era == "C" else POSSIBLE, reason, settings)


def _lmi_dist(era: str, aws: bool) -> BackendVerdict:
    settings = "engine=MPI, option.rolling_batch=lmi-dist"
    if aws:
        return BackendVerdict("LMI-Distributed", OUT, "runs on NVIDIA GPUs only", "")
    if era == "C":
        return BackendVerdict(
            "LMI-Distributed", OUT, "removed in 0.33: the name silently selects vLLM", ""
        )
    reason = {
        "A": "auto chooses it: paged cache, tensor parallelism, collectives tuned for p4d",
        "B": "auto chooses it up to 0.32; removed in 0.33",
    }[era]
    return BackendVerdict("LMI-Distributed", CHOSEN, reason, settings)


def _tensorrt(shape: ModelShape, instance: Instance, era: str, aws: bool) -> BackendVerdict:
    if aws:
        return BackendVerdict("TensorRT-LLM", OUT, "runs on NVIDIA GPUs only", "")
    family = shape.name.lower().replace("-", "")
    known = any(name in family for name in (*TENSORRT_JIT_0_26, *_TENSORRT_BEFORE))
    compiled = (
        "compiled at start-up or ahead of time, for this GPU type only"
        if known
        else "0.26 does not compile it at start-up: convert it by hand"
    )
    last = "" if era == "A" else "; its last image is 0.33.0 (TensorRT-LLM 0.21)"
    return BackendVerdict(
        "TensorRT-LLM",
        POSSIBLE,
        f"{compiled} ({instance.accelerator.name}){last}",
        "its own image, "
        + (
            "engine=MPI, option.rolling_batch=auto" if era == "A" else "option.rolling_batch=trtllm"
        ),
    )


def _neuronx(shape: ModelShape, era: str, aws: bool) -> BackendVerdict:
    name = "NeuronX"
    if not aws:
        return BackendVerdict(name, OUT, "for Inferentia2 and Trainium only", "")
    if era == "C":
        return BackendVerdict(name, OUT, f"removed in 0.33 (its image: {ERAS['B']})", "")
    if shape.is_moe:
        return BackendVerdict(name, OUT, "does not support mixture of experts", "")
    return BackendVerdict(
        name,
        CHOSEN,
        "shapes are compiled: option.n_positions is input and output together (128 unless set); "
        "option.tensor_parallel_degree counts cores",
        "engine=Python, option.rolling_batch=auto, option.n_positions=N",
    )


def _deepspeed(era: str, aws: bool) -> BackendVerdict:
    if aws:
        return BackendVerdict("DeepSpeed", OUT, "runs on NVIDIA GPUs only", "")
    if era == "A":
        return BackendVerdict(
            "DeepSpeed",
            POSSIBLE,
            "has its own SmoothQuant; rolling batches of 4 unless set",
            "engine=MPI, option.rolling_batch=deepspeed",
        )
    return BackendVerdict("DeepSpeed", OUT, "removed after 0.27", "")


def _tgi(aws: bool) -> BackendVerdict:
    if aws:
        return BackendVerdict("TGI", OUT, "this table has no Neuron image for it", "")
    return BackendVerdict(
        "TGI",
        POSSIBLE,
        "JumpStart's server in 2023, now in maintenance; rejects above its limits (LMI queues)",
        "TGI's variables",
    )


def degree_note(shape: ModelShape, instance: Instance) -> str:
    """The tensor-parallel degrees that the model's heads allow, and LMI's workers for each."""
    cores = instance.neuron_cores or instance.num_accelerators
    degrees = [
        degree
        for degree in (1, 2, 4, 8, 16, 24, 32)
        if degree <= cores and tensor_parallel_problem(shape, degree) is None
    ]
    copies = ", ".join(f"{degree} ({cores // degree} workers)" for degree in degrees)
    return (
        f"option.tensor_parallel_degree and the workers LMI then starts on {cores} "
        f"{'cores' if instance.neuron_cores else 'accelerators'}: {copies}; `max` is {cores}"
    )
