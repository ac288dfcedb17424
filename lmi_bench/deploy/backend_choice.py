"""Chooses an LMI backend for a model on an accelerator, with the reason for each verdict.

The rules (data/backends.csv; the first row that applies to a backend counts) follow the containers:
which backends an image includes, which values its validators accept, what `rolling_batch=auto`
resolves to. Source: LmiConfigRecommender.java and the release notes of djl-serving 0.26 to 0.36.
"""

from dataclasses import dataclass
from typing import Final

from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.tables import read_rows
from lmi_bench.deploy.images import machine_problem
from lmi_bench.models.shape import ModelShape, possible_degrees

CHOSEN, POSSIBLE, OUT = "chosen", "possible", "out"

TENSORRT_JIT_0_26: Final = (
    *("baichuan", "chatglm", "gpt2", "gptj", "internlm", "mistral", "mixtral", "qwen"),
    *("santacoder", "starcoder"),
)
"""Families that the TensorRT-LLM container compiles at start-up since version 0.26."""

_TENSORRT_BEFORE: Final = ("llama", "falcon")
_NEURON_DEGREES: Final = {True: (1, 2, 4, 8, 12, 24), False: (1, 2, 8, 32)}
"""Degrees of the Neuron runtime, in cores: Inferentia2's and Trainium's. transformers-neuronx pads
query heads to a multiple of the degree. Source: its developer guide and `get_qkv_padding`."""
EFFECTS: Final = read_rows("backend_effects.csv", "deploy")
"""Of each backend what its name and options do on the bundled engine, and what needs its device."""
_ENGINES: Final = {row["backend"]: row["engine"] for row in EFFECTS}
"""Engine of each backend's images; LMI's general image has vLLM."""


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
    accelerator = instance.accelerator.name
    vendor = "aws" if instance.accelerator.vendor == "aws" else "other"
    family = shape.name.lower().replace("-", "")
    compiles = any(name in family for name in (*TENSORRT_JIT_0_26, *_TENSORRT_BEFORE))
    holds = {"": True, "mixture of experts": shape.is_moe, "known family": compiles}
    verdicts: dict[str, BackendVerdict] = {}
    for row in read_rows("backends.csv", "deploy"):
        if era not in row["eras"] or vendor not in row["vendors"] or not holds[row["when"]]:
            continue
        reason = row["reason"].format(accelerator=accelerator)
        if row["backend"] == "vLLM" and not instance.accelerator.has_bfloat16:
            reason += f"; {accelerator} has no bfloat16: option.dtype=fp16"
        verdict = BackendVerdict(row["backend"], row["verdict"], reason, row["settings"])
        problem = machine_problem({_ENGINES[verdict.backend]}, instance)
        if problem is not None and verdict.verdict != OUT:
            verdict = BackendVerdict(row["backend"], OUT, problem, "")
        verdicts.setdefault(verdict.backend, verdict)
    order = (CHOSEN, POSSIBLE, OUT)
    return sorted(verdicts.values(), key=lambda verdict: order.index(verdict.verdict))


def auto_resolves_to(instance: Instance, era: str) -> str:
    """The backend of `option.rolling_batch=auto` for a text model in LMI's general container."""
    if instance.accelerator.vendor == "aws":
        return "NeuronX" if era != "C" else "nothing: LMI has no Neuron image since 0.33"
    return {"A": "lmi-dist", "B": "lmi-dist up to 0.32, then vllm", "C": "vllm in async mode"}[era]


def degree_note(shape: ModelShape, instance: Instance) -> str:
    """The tensor-parallel degrees that the model's heads allow, and LMI's workers for each."""
    cores = instance.neuron_cores or instance.num_accelerators
    degrees, pads = possible_degrees(shape, cores), ""
    if instance.neuron_cores:
        every = _NEURON_DEGREES[instance.accelerator.name.startswith("Inferentia")]
        degrees = [degree for degree in every if degree <= cores]
        padded = " and ".join(str(degree) for degree in degrees if shape.num_heads % degree)
        pads = padded and f"; {shape.num_heads} query heads are padded to a multiple of {padded}"
    copies = ", ".join(f"{degree} ({cores // degree} workers)" for degree in degrees)
    return (
        f"option.tensor_parallel_degree and the workers LMI then starts on {cores} "
        f"{'cores' if instance.neuron_cores else 'accelerators'}: {copies}; `max` is {cores}{pads}"
    )
