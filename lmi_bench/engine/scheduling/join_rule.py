"""When waiting prompts may pause running sequences: the admission rule of TGI's router.

A prompt step pauses decoding, so prompts join running sequences only where enough of them fit one
step, or after the running ones have decoded for a while. Source: `batching_task` and `next_batch`
of TGI's router (infer.rs, queue.rs) and its `--waiting-served-ratio` and `--max-waiting-tokens`.
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class JoinRule:
    """The state of the rule between two steps of one copy.

    decoded     decode steps since prompts were admitted last
    has_joined  whether these joined running sequences, which have not decoded since
    """

    waiting_served_ratio: float
    max_waiting_tokens: int
    decoded: int = 0
    has_joined: bool = False

    def least_joiners(self, num_running: int) -> float:
        """Fewest prompts that may be admitted together now; 0: any number, infinite: none."""
        if not self.max_waiting_tokens or not num_running:
            return 0
        if self.has_joined:
            return math.inf
        if 1 + self.decoded >= self.max_waiting_tokens:  # TGI counts the prompt step's token too
            return 0
        return math.floor(self.waiting_served_ratio * num_running)

    @property
    def steps_to_wait(self) -> int:
        """Decode steps until fewer prompts may be admitted, if the running ones stay."""
        return 1 if self.has_joined else max(1, self.max_waiting_tokens - 1 - self.decoded)

    def admitted(self, num_running: int) -> None:
        """Prompts were admitted while `num_running` sequences were running."""
        self.decoded, self.has_joined = 0, num_running > 0

    def after_decoding(self, num_steps: int) -> None:
        """The running sequences have decoded `num_steps` times."""
        self.decoded += num_steps
        self.has_joined = False
