"""Settings of the bundled engine's commands: serve, generate, compile, optimize, profile ..."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, Option, Settings, Stated, option
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.jobs.settings.engine import BATCHING, COMPILED, MODEL, STEP_TRACE

EXECUTORS: Final = ("torch", "simulated")
ENDS: Final = ("eos_token", "stop_sequence", "length", "context_full")
_SCORES: Final = "Scores and checks"
_SAMPLING: Final = SamplingParams(max_new_tokens=256)
_TRAINED: Final = "demo-text"
_MODEL: Final = Option("Demo model or Hugging Face folder.", ("--model", "-m"))


@dataclass(frozen=True, slots=True)
class ServeSettings(Settings):
    """A model, where and how it is served, and the engine behind it.

    executor  Executor: torch computes; simulated waits for each step's predicted time.
    instance  Instance to simulate, such as ml.g5.2xlarge.
    host  Address to listen on.
    port  Port to listen on; 0: any free port.
    api_key  Key that requests must send as a bearer token; /ping and /health need none.
    fair_by  Request header that names a client, such as X-Client or Authorization: waiting
        requests are taken from each in turn.
    client_share  Share of the batch and of the queue that a client of --fair-by may have, 0 to 1.
    lmi_replies  Response format: djl-serving's rolling (to 0.34), async (from 0.35) or batched (a
        list), or tgi on SageMaker's paths.
    require_signature  Signature check on SageMaker's paths with AWS_ACCESS_KEY_ID and
        AWS_SECRET_ACCESS_KEY.
    serving_properties  Settings of an LMI container: a serving.properties, its folder, or a
        model.tar.gz.
    djl_version  Version of djl-serving or LMI for --serving-properties, such as 0.26.0 or lmi28.
    model_py  Program to run with @input_formatter and @output_formatter of the LMI routes.
    model_loading_timeout  Time limit of model loading in seconds.
    """

    model: str | None = option(
        _MODEL,
        help="Demo model or Hugging Face folder; simulated: also a catalog name.",
        default="that of the serving.properties, or demo-15m",
    )
    executor: str = option(value="torch", one_of=EXECUTORS)
    instance: str | None = option()
    host: str = option(value="127.0.0.1")
    port: int = option(value=8080)
    api_key: str | None = option(envvar="LMI_BENCH_SERVER_KEY")
    fair_by: str | None = option(default="first come, first served", rare=True)
    client_share: float = option(value=1.0, must="above 0 and at most 1", rare=True)
    lmi_replies: str | None = option(
        default="the serving.properties' container's, tgi with TGI's variables, else rolling", rare=True
    )
    require_signature: bool = option(value=False)
    serving_properties: Path | None = option()
    djl_version: str | None = option(default="the newest in which all of the file has an effect")
    model_py: Path | None = option(rare=True)
    model_loading_timeout: int | None = option(default="no limit", rare=True)
    model_options: Stated = MODEL
    batching: Stated = BATCHING
    step_trace: Path | None = option(STEP_TRACE, old_names=("--trace",), group="Engine: batching")

    def _check(self) -> None:
        if self.executor == "simulated" and self.instance is None:
            raise InputError("--executor simulated needs --instance, such as ml.g5.2xlarge")
        if self.executor == "torch" and self.instance is not None:
            raise InputError(f"--instance {self.instance} needs --executor simulated")
        if self.client_share < 1 and self.fair_by is None:
            raise InputError("--client-share needs to know a client: add --fair-by HEADER")


@dataclass(frozen=True, slots=True)
class GenerateSettings(Settings):
    """A prompt for a model, how it is continued, or which answers to score instead.

    prompt  Text to continue; - reads it from stdin.
    stop  Text that ends the answer; repeatable.
    until_done  Further requests until the text ends or fills the context.
    confidence  Confidence exp(mean log-probability) of the tokens; models are overconfident.
    logprobs  Number of likeliest tokens, 0 to 20, to print with each token's log-probability.
    choices  Answer to rank by joint log-probability; nothing is generated; repeatable.
    questions  JSON lines with prompt, choices and answer, to compare confidence with correctness.
    """

    model: str = option(_MODEL, value=_TRAINED)
    prompt: str = option("--prompt", "-p", value="-")
    sampling: SamplingParams = _SAMPLING
    stop: tuple[str, ...] = option(value=(), group=_SAMPLING.GROUP)
    until_done: bool = option(value=False, group=_SAMPLING.GROUP)
    confidence: bool = option(value=False, group=_SCORES)
    logprobs: int | None = option(group=_SCORES)
    choices: tuple[str, ...] = option(value=(), group=_SCORES)
    questions: Path | None = option(metavar="FILE.jsonl", group=_SCORES)
    expect_end: tuple[str, ...] = option(
        f"Expected end of the text: {', '.join(ENDS)}; repeatable. Exit 1 otherwise.",
        value=(),
        one_of=ENDS,
        group=_SCORES,
    )
    model_options: Stated = MODEL

    def _check(self) -> None:
        if "" in self.stop:
            raise InputError("--stop '': an empty text would end every answer; leave it out")
        if len(self.choices) == 1:
            raise InputError("--choices needs at least two answers to rank: --choices yes --choices no")
        given = {
            "--stop": self.stop,
            "--until-done": self.until_done,
            "--expect-end": self.expect_end,
            "--confidence": self.confidence,
            "--logprobs": self.logprobs is not None,
            "--max-new-tokens and other sampling": self.sampling != _SAMPLING,
        }
        idle = [name for name, is_given in given.items() if is_given]
        if idle and (self.choices or self.questions is not None):
            raise InputError(f"given answers are scored and none is generated: leave out {', '.join(idle)}")


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The model, the shapes of its decode steps, and the folder for what is compiled."""

    model: str = option("Demo model or Hugging Face folder.", value=REQUIRED, argument=True)
    out: Path = option("Folder for the compiled steps; earlier ones stay.", "--out", "-o", value=REQUIRED)
    shapes: str | None = option(
        "Shapes of the steps as SEQUENCESxTOKENS of context, such as 1x512,8x512.",
        old_names=("--compile-shapes",),
        default="1, 4 and 16 sequences at a quarter and all of the model's positions",
    )
    steps: Stated = COMPILED


@dataclass(frozen=True, slots=True)
class ConvertSettings:
    """A model folder and the folder for its copy."""

    folder: Path = option("Model folder with pytorch_model*.bin.", value=REQUIRED, argument=True)
    out: Path = option("New folder.", "--out", "-o", value=REQUIRED)


@dataclass(frozen=True, slots=True)
class PerplexitySettings(Settings):
    """A model, a text, and the lengths at which the model reads it."""

    model: str = option(_MODEL, value=_TRAINED)
    lengths: str = option("Window lengths in tokens, such as 128,256,512.", value="128,256,512")
    rope_scaling: tuple[str, ...] = option(
        "RoPE scaling to score, too: linear:2, dynamic:4 or yarn:4; repeatable.", value=()
    )
    text: Path | None = option(
        "Text, or JSON lines with `text` or `prompt`.",
        default="a built-in text; for demo-text, of the kind that it has learnt",
    )
    max_tokens: int = option("Maximum number of tokens to score.", value=8192, must="at least 2")
    dtype: str = option("Number format of the weights: float32, bfloat16 or float16.", value="float32")
    quantize: str = option("Quantization: none, int8, awq-int4, awq-int3, smoothquant or fp8.", value="none")


@dataclass(frozen=True, slots=True)
class OptimizeSettings:
    """A recipe of techniques, and what replaces parts of it."""

    recipe: Path | None = option("Variants to try and data to judge them on.", argument=True, metavar="[RECIPE.yaml]")
    model: str | None = option(_MODEL, help="Model: a demo model or a folder.", default="the recipe's")
    dataset: Path | None = option("Prompts as JSON lines with `prompt`.", default="the recipe's")
    text: Path | None = option("Text file for the perplexity.", default="the recipe's")
    out: Path | None = option("Folder of the job.", "--out", "-o", default="below runs/")


@dataclass(frozen=True, slots=True)
class CollectiveSettings(Settings):
    """How all-reduces are timed.

    ranks  Number of processes that add their arrays.
    groups  Groups of ranks that add side by side, as LMI-Distributed's TP 4 of 8; timed beside all.
    transport  Transport: shared-memory, gloo, or nccl between GPUs; repeatable.
    rounds  Rounds of each size; the median counts.
    out  File for times and fit (JSON).
    """

    ranks: int = option(value=2)
    groups: int = option(value=1, must="at least 1")
    transport: tuple[str, ...] = option(value=(), default="shared-memory and gloo")
    rounds: int = option(value=5, must="at least 1")
    out: Path | None = option("--out", "-o")

    def _check(self) -> None:
        if self.ranks < 2:
            raise InputError(f"--ranks {self.ranks}: an all-reduce needs at least 2")
        if self.ranks % self.groups or self.ranks // self.groups < 2:
            raise InputError(f"--groups {self.groups}: {self.ranks} ranks give no equal groups of at least 2")


@dataclass(frozen=True, slots=True)
class AttentionSettings(Settings):
    """Which attention is timed.

    tokens  Prompt length in tokens; repeatable.
    heads  Number of query heads.
    head_dim  Size of a head.
    rounds  Rounds of each implementation; the median counts.
    """

    tokens: tuple[int, ...] = option(value=(), default="256, 1,024 and 4,096", must="at least 1")
    heads: int = option(value=12, must="at least 1")
    head_dim: int = option(value=64, must="at least 1")
    rounds: int = option(value=5, must="at least 1")
