"""Pauses of a level: moments in which no stream that was decoding had a token for longer than usual.

A step ends where tokens come after a silence of half a usual gap or more. Prefills may take longer:
those of the prompts whose first token ends the step, and of the next ones, where they have been
sent, as far as the steps until their first token leave of it. A stream that resumes after others
had tokens was preempted and is such a prompt, too. A prompt token is taken to need the 95th
percentile of what those of the longer prompts took, and no less than the mean. The limits are those
with which `benchmarks/speed_steps.py` finds pauses and calls no prefill one.
"""

import numpy as np

from lmi_bench.analysis.results.columns import Columns
from lmi_bench.analysis.results.quantiles import FloatArray
from lmi_bench.core.steadiness import Pauses
from lmi_bench.core.units import MS_PER_S

_LEAST_S, _LEAST_STEPS = 0.05, 4.0  # more than explained, in seconds and in usual gaps
_TOGETHER_S = 0.001  # tokens of one read, or of one step
_SLOW, _SPREAD, _NEXT, _NAMED = 0.95, 1.1, 1.25, 10


def pauses(columns: Columns, input_tokens: FloatArray) -> Pauses | None:
    """The pauses of all streams, from each request's prompt tokens, shape (n,); None without any."""
    times_s, owner = columns.times_s, columns.owner
    within, gaps_s = owner[1:] == owner[:-1], np.diff(times_s)
    if not (apart := within & (gaps_s > _TOGETHER_S)).any():
        return None
    usual_s, ordered_s = float(np.median(gaps_s[apart])), np.sort(times_s)
    ends = np.flatnonzero(np.diff(ordered_s) > usual_s / 2)
    start_s, end_s = ordered_s[ends], ordered_s[ends + 1]
    extra_s = np.maximum(end_s - start_s - usual_s, 0.0)
    least_s = max(_LEAST_S, _LEAST_STEPS * usual_s)
    if not (extra_s > least_s).any():
        return None
    begins = np.flatnonzero(np.append(True, ~within))
    later = np.flatnonzero(within & (gaps_s > _LEAST_STEPS * usual_s)) + 1
    later = later[times_s[later - 1] < start_s[np.searchsorted(start_s, times_s[later]) - 1] - usual_s / 2]
    stopped_s = times_s[later - 1]
    first = np.concatenate([begins, later])
    order = np.argsort(times_s[first], kind="stable")
    known_s = np.append(np.concatenate([columns.sent_s[owner[begins]], stopped_s])[order], np.inf)
    first = first[order]
    tokens = input_tokens[owner[first]] + first - begins[np.searchsorted(begins, first, side="right") - 1]
    total = np.append(0.0, np.cumsum(tokens))
    before = np.searchsorted(times_s[first], start_s, side="right")  # had begun by each step's start
    after = np.append(before[1:], len(first))
    prompts = total[after] - total[before]
    stopped_s = np.sort(np.concatenate([columns.last_s[owner[begins]], stopped_s]))
    is_decoding = before > np.searchsorted(stopped_s, start_s, side="right")
    waits = known_s[after] < end_s
    token_s = _SPREAD * float(extra_s[waits | (prompts > 0)].sum()) / max(1.0, total[-1])
    if (one := is_decoding & (prompts > 0)).any():
        one &= prompts >= np.median(prompts[one])
        token_s = max(token_s, float(np.quantile(extra_s[one] / prompts[one], _SLOW)))
    spent_s = np.append(0.0, np.cumsum(extra_s))
    step = np.append(np.searchsorted(start_s, times_s[first]) - 1, 0)[after]  # of the next first token
    calm = np.cumsum(extra_s < usual_s / 2)  # a prefill goes on in each step
    waits &= (calm[step - 1] == calm) | (step == np.arange(len(ends)) + 1)
    left_s = _NEXT * token_s * prompts[step] - (spent_s[step] - spent_s[1:]) - np.where(waits, 0.0, extra_s)[step]
    extra_s -= token_s * prompts + np.where(waits, np.maximum(left_s, 0.0), 0.0)
    found = np.flatnonzero(is_decoding & (extra_s > least_s))
    if not found.size:
        return None
    took_s = end_s[found] - start_s[found]
    named = np.sort(found[np.argsort(-took_s)[:_NAMED]])
    return Pauses(int(found.size), float(took_s.sum()), float(took_s.max()) * MS_PER_S, start_s[named].tolist())
