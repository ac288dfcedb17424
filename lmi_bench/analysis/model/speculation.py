"""Speculative decoding in the plan: k tokens drafted and verified in one step.

With acceptance a a step gives (1 - a ** (k + 1)) / (1 - a) tokens on average. It costs k steps of
the draft model and one of the model over k + 1 rows a sequence, which reads the cache once. Source:
Leviathan et al. 2023, arXiv:2211.17192, equation 1.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.model import step_time
from lmi_bench.analysis.model.setup import Speculation
from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.step_shape import StepShape, StepTime

_HALVINGS = 60


def acceptance_of_counts(drafted: int, accepted: int, draft_tokens: int) -> float:
    """The acceptance a from an engine's counters; raises InputError where nothing was drafted.

    accepted / drafted = (a + a ** 2 + ... + a ** k) / k, solved for a
    """
    if drafted < 1 or not 0 <= accepted <= drafted:
        raise InputError(f"{accepted} of {drafted} drafted tokens were accepted: no acceptance follows from that")
    share = accepted / drafted
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        mean = sum(middle ** (place + 1) for place in range(draft_tokens)) / draft_tokens
        low, high = (middle, high) if mean < share else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class DraftedStepTime:
    """A StepTime of real steps: the draft model's steps, then the model's own step.

    The draft has computed `decode_tokens` - `decode_sequences` tokens, in as many steps as the
    longest draft has tokens; prompts pass through both models.
    """

    target: step_time.StepTimeModel
    draft: step_time.StepTimeModel | None

    def step_time_s(self, shape: StepShape) -> float:
        """Seconds of drafting and verifying."""
        target_s = self.target.step_time_s(shape)
        if self.draft is None:
            return target_s
        rows = shape.decode_sequences
        if not rows:
            return target_s + self.draft.step_time_s(shape)
        drafts = -(-(shape.decode_tokens - rows) // rows)
        context = max(rows, shape.decode_context_tokens - shape.decode_tokens)
        alone = StepShape.decoding(rows, context)
        alone_s = self.draft.step_time_s(alone)
        if not shape.prefill_tokens:
            return target_s + drafts * alone_s
        first = replace(shape, decode_tokens=rows, decode_context_tokens=context)
        return target_s + self.draft.step_time_s(first) + max(0, drafts - 1) * alone_s


@dataclass(frozen=True, slots=True)
class SpeculativeModel:
    """`PricedSteps` of one token a sequence: decoding divided by the tokens of a step.

    For closed forms and traces, in which a sequence gains one token a step and has one row; k more
    are added here. The time of prompts is not divided: they run beside a whole step.
    """

    target: step_time.StepTimeModel
    draft: step_time.StepTimeModel | None
    speculation: Speculation

    @property
    def real_steps(self) -> StepTime:
        """The StepTime for a simulation of real steps."""
        return DraftedStepTime(self.target, self.draft)

    def explain(self, step: StepShape) -> step_time.StepParts:
        """The parts of one verifying step of the model."""
        drafted = self.speculation.draft_tokens * step.decode_sequences
        return self.target.explain(
            replace(
                step,
                decode_tokens=step.decode_sequences + drafted,
                decode_context_tokens=step.decode_context_tokens + drafted,
            )
        )

    def step_time_s(self, shape: StepShape) -> float:
        """Seconds of one token for every sequence, and of the step's prompts."""
        copy_s = self.target.costs.copy_token_s * shape.copied_tokens
        return copy_s + self.pricer()(*step_time.counts_of(shape))

    def step_times_s(self, steps: step_time.StepColumns) -> NDArray[np.float64]:
        """Seconds of each row, repeats included, shape (rows,)."""
        price = self.pricer()
        rows = zip(*steps.counts, strict=True)
        return np.array([price(*row) for row in rows], dtype=np.float64) * steps.repeat

    def pricer(self) -> step_time.Pricer:
        """`step_time_s` as a plain function of counts."""
        drafted = self.target.drafted
        draft = None if self.draft is None else self.draft.pricer()
        more, gain = self.speculation.draft_tokens, self.speculation.tokens_per_step

        def priced(rows: int, context: int, prompts: int, tokens: int, pairs: float, cached: int) -> float:
            context_all = context + more * rows
            every = (more + 1) * rows
            decode_s = whole_s = 0.0
            if rows:
                decode_s = whole_s = drafted((rows, context_all, 0, 0, 0.0, 0), every)[-1]
                if draft is not None:
                    decode_s += more * draft(rows, context, 0, 0, 0.0, 0)
                decode_s /= gain
            if not tokens:
                return decode_s
            step_s = drafted((rows, context_all, prompts, tokens, pairs, cached), every)[-1] - whole_s
            if draft is not None:
                step_s += draft(0, 0, prompts, tokens, pairs, cached)
            return decode_s + step_s

        return priced


PricedSteps = step_time.StepTimeModel | SpeculativeModel
"""A model of step times, for closed forms, traces and simulations."""
