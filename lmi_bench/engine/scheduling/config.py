"""The scheduler's settings, validated. Times are in seconds, lengths in tokens."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lmi_bench.core.errors import CapacityError, InputError


class BatchingPolicy(StrEnum):
    """How requests are batched.

    NONE     one request at a time
    DYNAMIC  collect `batch_size` requests or wait `max_batch_delay_s`, then run the whole batch
             until every request has finished
    ROLLING  after every step finished sequences leave and waiting ones enter
    """

    NONE = "none"
    DYNAMIC = "dynamic"
    ROLLING = "rolling"


class KvLayout(StrEnum):
    """PAGED allocates blocks as a sequence grows; CONTIGUOUS reserves them all at admission."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


DEFAULT_ROLLING_BATCH_SIZE: Final = 32
"""Maximum sequences in the rolling batch, as in LMI up to 0.26."""

DEFAULT_WAITING_SERVED_RATIO: Final = 1.2  # as in TGI before 3.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of one scheduler.

    num_blocks                        KV-cache blocks of `block_size` tokens
    max_model_len                     maximum tokens (input + output) per request
    batch_size, max_batch_delay_s     dynamic batching: LMI's batch_size and max_batch_delay
    max_rolling_batch_size            maximum sequences in the rolling batch
    max_rolling_batch_prefill_tokens  maximum prompt tokens per step
    chunked_prefill                   split prompts and mix them with decode rows; otherwise a
                                      prefill step pauses decoding
    max_waiting_tokens                decode steps after which waiting prompts may pause the running
                                      sequences, as in TGI; 0: at once
    waiting_served_ratio              before that, as many prompts as this times the running ones
    max_input_tokens                  maximum prompt tokens; None: limited only by max_model_len
    prefix_caching                    keep computed blocks and share them between prompts with
                                      a common prefix
    host_blocks                       blocks on the host for what that evicts; simulated only
    max_concurrent_requests           reject requests above this; None: queue all
    client_share                      share of the batch's slots and of max_concurrent_requests that
                                      one client may have; 1: all, so that turns alone count
    recompute_on_join                 a joining request makes every running sequence recompute its
                                      cache: a baseline, as in engines that cannot insert a row
                                      into a cache in use
    attention_window                  tokens that a position attends to, itself included, if every
                                      layer has a window: paged blocks outside it are freed.
                                      None: some layer has no window. A request must still fit
                                      whole, since a preempted one recomputes all its tokens
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 4096
    policy: BatchingPolicy = BatchingPolicy.ROLLING
    kv_layout: KvLayout = KvLayout.PAGED
    batch_size: int = 1
    max_batch_delay_s: float = 0.1
    max_rolling_batch_size: int = DEFAULT_ROLLING_BATCH_SIZE
    max_rolling_batch_prefill_tokens: int = 4096
    chunked_prefill: bool = False
    max_waiting_tokens: int = 0
    waiting_served_ratio: float = DEFAULT_WAITING_SERVED_RATIO
    max_concurrent_requests: int | None = None
    prefix_caching: bool = False
    host_blocks: int = 0
    max_input_tokens: int | None = None
    attention_window: int | None = None
    recompute_on_join: bool = False
    client_share: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in (("policy", BatchingPolicy), ("kv_layout", KvLayout)):
            value = getattr(self, name)
            if value not in list(kind):
                raise InputError(f"{name} must be one of {', '.join(kind)}, got {value!r}")
            object.__setattr__(self, name, kind(value))
        for name in (
            "block_size",
            "max_model_len",
            "batch_size",
            "max_rolling_batch_size",
            "max_rolling_batch_prefill_tokens",
            "max_concurrent_requests",
            "attention_window",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.max_input_tokens is not None and not (1 <= self.max_input_tokens < self.max_model_len):
            raise InputError(
                f"max_input_tokens must be from 1 to {self.max_model_len - 1:,}, one less than "
                f"max_model_len, got {self.max_input_tokens:,}"
            )
        if self.num_blocks < 1:
            raise CapacityError(
                f"the KV cache has {self.num_blocks} blocks of {self.block_size} tokens; "
                "at least 1 is needed: free memory or use a smaller model"
            )
        if not 0 < self.client_share <= 1:
            raise InputError(f"client_share must be above 0 and at most 1, got {self.client_share:g}")
        if self.max_batch_delay_s < 0:
            raise InputError(f"max_batch_delay_s must be 0 or more, got {self.max_batch_delay_s:g}")
        if self.max_waiting_tokens < 0 or not self.waiting_served_ratio >= 0:
            raise InputError(
                f"max_waiting_tokens {self.max_waiting_tokens} and waiting_served_ratio "
                f"{self.waiting_served_ratio:g} must be 0 or more"
            )
        whole_prompts = self.policy is BatchingPolicy.ROLLING and not self.chunked_prefill
        if self.max_waiting_tokens and (not whole_prompts or self.recompute_on_join):
            raise InputError("max_waiting_tokens needs policy rolling without chunked_prefill and recompute_on_join")
        if self.recompute_on_join and (not whole_prompts or self.prefix_caching):
            raise InputError("recompute_on_join needs policy rolling without chunked_prefill and prefix_caching")

    def check_fits(self, seq_id: int, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise InputError for an empty prompt, CapacityError for a request that can never run."""
        if num_prompt_tokens < 1:
            raise InputError(f"request {seq_id} has an empty prompt: send at least 1 token")
        longest = self.max_input_tokens
        if longest is not None and num_prompt_tokens > longest:
            raise CapacityError(
                f"request {seq_id} has {num_prompt_tokens:,} input tokens but the engine accepts "
                f"at most {longest:,}: shorten the prompt or raise max_input_tokens"
            )
        needed = num_prompt_tokens + max_new_tokens
        sizes = f"(prompt {num_prompt_tokens:,} + output {max_new_tokens:,})"
        if needed > self.max_model_len:
            raise CapacityError(
                f"request {seq_id} needs {needed:,} tokens {sizes} but the engine accepts at most "
                f"{self.max_model_len:,}: send less or raise max_model_len"
            )
        if needed > self.cache_tokens:
            raise CapacityError(
                f"the KV cache holds {self.cache_tokens:,} tokens but request {seq_id} needs "
                f"{needed:,} {sizes}: send less, or raise the KV blocks from {self.num_blocks:,} "
                f"to at least {-(-needed // self.block_size):,}"
            )

    @property
    def max_running(self) -> int:
        """Most sequences in a batch under this policy."""
        return {
            BatchingPolicy.NONE: 1,
            BatchingPolicy.DYNAMIC: self.batch_size,
            BatchingPolicy.ROLLING: self.max_rolling_batch_size,
        }[self.policy]

    @property
    def cache_tokens(self) -> int:
        """Capacity of the whole cache in tokens."""
        return self.num_blocks * self.block_size
