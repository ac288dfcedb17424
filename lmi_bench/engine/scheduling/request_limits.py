"""Rejects requests that can never run, before they are queued."""

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.scheduling.config import SchedulerConfig


def check_fits(
    config: SchedulerConfig, seq_id: int, num_prompt_tokens: int, max_new_tokens: int
) -> None:
    """Raises InputError for an empty prompt, CapacityError for a request that can never run."""
    if num_prompt_tokens < 1:
        raise InputError(f"request {seq_id} has an empty prompt: send at least 1 token")
    longest = config.max_input_tokens
    if longest is not None and num_prompt_tokens > longest:
        raise CapacityError(
            f"request {seq_id} has {num_prompt_tokens:,} input tokens but the engine accepts at "
            f"most {longest:,}: shorten the prompt or raise max_input_tokens"
        )
    needed = num_prompt_tokens + max_new_tokens
    sizes = f"(prompt {num_prompt_tokens:,} + output {max_new_tokens:,})"
    if needed > config.max_model_len:
        raise CapacityError(
            f"request {seq_id} needs {needed:,} tokens {sizes} but the engine accepts at most "
            f"{config.max_model_len:,}: send less or raise max_model_len"
        )
    if needed > config.cache_tokens:
        raise CapacityError(
            f"the KV cache holds {config.cache_tokens:,} tokens but request {seq_id} needs "
            f"{needed:,} {sizes}: send less, or raise the KV blocks from {config.num_blocks:,} "
            f"to at least {-(-needed // config.block_size):,}"
        )
