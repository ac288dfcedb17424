"""Chooses the draft length of each sequence from its recent acceptance rate.

A step that verifies k draft tokens takes about 1 + c k times a plain step, where c is the cost of
drafting and verifying one token. If each token is accepted with probability a once those before it
are, the step yields 1 + a + ... + a^k tokens (Leviathan et al. 2023, arXiv:2211.17192, equation 1).
The best k maximizes tokens per time. If that is 0, a single draft token now and then probes whether
the text has become easier to predict.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.drafting import Drafter
from lmi_bench.engine.scheduling.sequence import Sequence

DEFAULT_GUESS_COST: Final = 0.1
"""Time per draft token as a share of a plain step, if nothing better is known."""

PROBE_EVERY: Final = 16  # steps without a draft before one token is tried again

_PRIOR_CHANCE: Final = 0.8
_PRIOR_WEIGHT: Final = 2.0  # in draft tokens
_KEPT: Final = 0.9  # decay of the past counts at each verification


@dataclass(slots=True)
class _Pace:
    """A sequence's acceptance history, with exponential decay.

    held, tried  draft tokens accepted and verified
    seen         the sequence's counts (accepted, rejected) at the last update
    idle         steps since the last draft
    """

    held: float = _PRIOR_CHANCE * _PRIOR_WEIGHT
    tried: float = _PRIOR_WEIGHT
    seen: tuple[int, int] = (0, 0)
    idle: int = 0


@dataclass(frozen=True)
class AdaptiveDrafter:
    """Wraps a drafter and limits its drafts to the length that pays.

    guess_cost_frac  time to draft and verify one token, as a share of a plain step
    """

    drafter: Drafter
    num_tokens: int
    _: KW_ONLY
    guess_cost_frac: float = DEFAULT_GUESS_COST
    probe_every: int = PROBE_EVERY

    def __post_init__(self) -> None:
        if self.guess_cost_frac <= 0:
            raise InputError(f"guess_cost_frac must be above 0, got {self.guess_cost_frac:g}")

    def __call__(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """At most `most` draft tokens; none while drafting does not pay."""
        if not isinstance(seq.pace, _Pace):
            seq.pace = _Pace()
        pace = seq.pace
        held, wrong = seq.num_accepted - pace.seen[0], seq.num_rejected - pace.seen[1]
        if held or wrong:
            pace.seen = (seq.num_accepted, seq.num_rejected)
            pace.held = _KEPT * pace.held + held
            pace.tried = _KEPT * pace.tried + held + wrong
        chance, most = pace.held / pace.tried, min(most, self.num_tokens)
        wanted = best_draft_length(chance, self.guess_cost_frac, most=most)
        if not wanted:
            pace.idle += 1
            if pace.idle < self.probe_every:
                return ()
            wanted = 1
        pace.idle = 0
        return self.drafter(seq, wanted)


def best_draft_length(chance: float, guess_cost_frac: float, *, most: int) -> int:
    """The draft length, 0 to `most`, that yields the most tokens per time.

    (1 + a + ... + a^k) / (1 + c k), the smaller k on a tie

    >>> best_draft_length(0.6, 0.1, most=8), best_draft_length(0.05, 0.1, most=8)
    (3, 0)
    """
    best, best_speed = 0, 1.0
    tokens = term = 1.0
    for length in range(1, most + 1):
        term *= chance
        tokens += term
        speed = tokens / (1 + guess_cost_frac * length)
        if speed > best_speed:
            best, best_speed = length, speed
    return best
