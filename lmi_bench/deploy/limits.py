"""Limits of one copy on a server: sequences, context, tokens of a step, share of the memory.

They start from the workload's lengths, and from the memory that this version of the server uses.
"""

from dataclasses import dataclass, replace
from typing import Final

from lmi_bench.analysis.level.layouts import slots_of
from lmi_bench.analysis.model.builtin_profiles import prior_of_engine
from lmi_bench.analysis.model.capacity import reserve_bytes_of, scheduler_config_for
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.analysis.model.profiles import SGLANG, EngineProfile, as_set
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import plural
from lmi_bench.deploy.images import SERVERS, Image, find_image
from lmi_bench.deploy.settings import NOTHING, Stated

_LEAST_SEQUENCES: Final = 32
"""A paged cache admits by free blocks: a lower limit only makes requests wait."""
_EARLY_VLLM: Final = "0.5"  # in LMI's images that state no version, of 2024
_CONTEXT_STEP: Final = 256
_LONGER_THAN_MEAN: Final = 4
_MOST_SHARE: Final = 0.9  # SGLang's profile takes the whole device, which leaves no room for graphs
_RESERVING: Final = ("neuronx", "deepspeed")
"""Families whose sequences reserve the cache of a whole context."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a workload's requests in tokens, and the sequences that run at once in a copy.

    input_tokens, output_tokens  means; longest: of input and output together
    are_means                    True if only the means are known, so that requests may be longer
    """

    input_tokens: int
    output_tokens: int
    longest_prompt: int
    longest: int
    batch: float = 1.0
    are_means: bool = False


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """The limits that every server's files state in their own words.

    max_num_seqs      sequences that run at once; expected: that the memory holds at these lengths
    max_model_len     tokens of a request, input and output together
    max_input_tokens  tokens of a prompt
    step_tokens       tokens of a step
    memory_share      share of a device's memory that the server takes, 0 to 1
    static_share      part of the memory for weights and cache, 0 to 1
    basis             origin, for the files' comments
    """

    max_num_seqs: int
    expected: int
    max_model_len: int
    max_input_tokens: int
    step_tokens: int
    memory_share: float
    static_share: float
    basis: str


def profile_of(image: Image | None, server: str) -> EngineProfile:
    """The profile nearest to the engine inside an image; None: inside the server's newest."""
    image = image or find_image(SERVERS[server][0])
    early = _EARLY_VLLM if image.djl and image.engine == "vllm" else ""
    engine = f"{image.engine} {image.engine_version or early}"
    prior = prior_of_engine(engine, models=(), accelerators=(), open_loop=False)
    return replace(prior, memory_share=min(prior.memory_share, _MOST_SHARE))


def served_limits(
    setup: Setup,
    profile: EngineProfile,
    lengths: Lengths,
    stated: Stated = NOTHING,
    *,
    engine: EngineSetting = AS_STATED,
    image: Image | None = None,
) -> ServedLimits:
    """The limits of a copy; the context holds the workload's longest request.

    Raises CapacityError where memory does not hold it, InputError for stated limits below it.
    """
    _check(stated, lengths)
    shape, memory_bytes = setup.shape, setup.instance.accelerator.memory_bytes
    profile = engine.profile(profile)
    config = scheduler_config_for(setup, profile, stated.max_model_len or lengths.longest)
    cache_tokens = config.num_blocks * config.block_size
    room = cache_tokens / max(1.0, lengths.batch)
    if lengths.are_means:
        room = max(room, min(cache_tokens, _LONGER_THAN_MEAN * lengths.longest))
    room = min(room, cache_tokens / setup.parallelism.attention_groups)  # a request is in one
    room = min(shape.max_positions, int(room) // _CONTEXT_STEP * _CONTEXT_STEP)
    context = stated.max_model_len or max(lengths.longest, room)
    surely, most = max(1, cache_tokens // context), config.max_rolling_batch_size
    expected = slots_of(config, lengths.input_tokens, lengths.output_tokens)
    sequences = max(expected, min(_LEAST_SEQUENCES, most))
    if image is not None and image.family in _RESERVING:
        sequences = min(surely, most)
    sequences = stated.max_batch or engine.max_batch_size or sequences
    tokens = engine.max_prefill_tokens or config.max_rolling_batch_prefill_tokens
    if profile.defaults == SGLANG:  # chunks, which pause decoding
        tokens = as_set(profile, shape, setup.instance.accelerator).max_prefill_tokens
    elif not profile.chunked_prefill:
        tokens = max(tokens, context)
    answer = max(1, lengths.longest - lengths.longest_prompt)
    return ServedLimits(
        max_num_seqs=sequences,
        expected=expected,
        max_model_len=context,
        max_input_tokens=stated.max_input_tokens or context - min(answer, context - 1),
        step_tokens=max(tokens, sequences),
        memory_share=profile.memory_share,
        static_share=profile.memory_share - reserve_bytes_of(setup, profile) / memory_bytes,
        basis=f"{plural(surely, 'request')} of {context:,} tokens always fit in a copy, "
        f"{expected} of {lengths.input_tokens:,} + {lengths.output_tokens:,} tokens are "
        f"expected to ({profile.label}, {profile.memory_share:.0%} of the memory)",
    )


def _check(stated: Stated, lengths: Lengths) -> None:
    """Raise InputError for a limit that the workload exceeds or that contradicts another."""
    context, prompt = stated.max_model_len, stated.max_input_tokens
    for flag, limit, longest, what in (
        ("--max-model-len", context, lengths.longest, "request"),
        ("--max-input-tokens", prompt, lengths.longest_prompt, "prompt"),
    ):
        if limit is not None and limit < longest:
            raise InputError(
                f"{flag} {limit:,} is below the workload's longest {what} of {longest:,} tokens: "
                "raise it, or plan for shorter ones"
            )
    if context is not None and prompt is not None and prompt >= context:
        raise InputError(
            f"--max-input-tokens {prompt:,} leaves no token for the answer in --max-model-len {context:,}: lower it"
        )
