"""A target's answer to one request; times are seconds on the loop's clock until shifted."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache


def packed(times_s: Sequence[float], counts: Sequence[int]) -> tuple["array[float]", Sequence[int]]:
    """Times and token counts of an answer's events as a run keeps them: 8 bytes an event.

    No counts stand for one token in each event; such counts are shared by all answers of a length.
    """
    ones = _ones(len(times_s))
    return (
        times_s if isinstance(times_s, array) else array("d", times_s),
        ones if not counts or tuple(counts) == ones else tuple(counts),
    )


@lru_cache(maxsize=4096)
def _ones(num_events: int) -> tuple[int, ...]:
    return (1,) * num_events


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request's answer, complete or as much of it as arrived.

    sent_s            when the request was handed to the target's transport
    token_times_s     arrival time of each event that carried tokens; an event is one server chunk
    token_counts      tokens in each event; default: 1 each
    ended_s           end of the answer including its trailer; None: same as the last token
    input_tokens, output_tokens  as the server counted them; None: it did not say
    connect_s         time to open a connection before `sent_s`, if one was opened;
                      tls_s: its TLS handshake alone
    ttft_bound_s      upper bound on how much too long the measured TTFT (from `sent_s`) may be;
                      None: unknown
    first_answer_s    first token after the reasoning, if the answer began with reasoning
    reasoning_tokens  reasoning tokens, counted as in `token_counts`
    streamed          False: the answer came in one piece, so no time within it is known
    replica           number of the replica that answered, if known
    queue_s, prefill_s, decode_s  seconds in each stage of the server, if it reports them
    retries           sends after the first one, if failures are retried
    held_s            wait before `sent_s` that a cap imposed: on requests in flight, on connections
    token_ids         token ids of the answer, if the target knows them
    cached_tokens     prompt tokens found in the server's prefix cache, if it reports them
    thought_chars     number of leading characters of `text` that are reasoning
    adapter           adapter of the model that the request asked for

    Times and counts are kept as `packed` gives them.
    """

    sent_s: float
    token_times_s: Sequence[float] = ()
    token_counts: Sequence[int] = ()
    text: str = ""
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    ended_s: float | None = None
    connect_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tls_s: float | None = None
    ttft_bound_s: float | None = None
    first_answer_s: float | None = None
    reasoning_tokens: int = 0
    streamed: bool = True
    replica: int | None = None
    retries: int = 0
    held_s: float = 0.0
    token_ids: Sequence[int] = ()
    cached_tokens: int | None = None
    thought_chars: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        times_s, counts = packed(self.token_times_s, self.token_counts)
        object.__setattr__(self, "token_times_s", times_s)
        object.__setattr__(self, "token_counts", counts)
        if len(self.token_counts) != len(self.token_times_s):
            raise ValueError(f"{len(self.token_times_s)} token times but {len(self.token_counts)} counts")

    @property
    def last_s(self) -> float:
        """The answer's end as far as known: its last token, or else when it was sent."""
        if self.ended_s is not None:
            return self.ended_s
        return self.token_times_s[-1] if self.token_times_s else self.sent_s

    def shifted(self, start_s: float) -> "Exchange":
        """The same exchange with times relative to `start_s`, without its text and token ids.

        Records are kept for a whole sweep and sent between processes; no metric needs the text.
        """
        return replace(
            self,
            sent_s=self.sent_s - start_s,
            token_times_s=array("d", [t - start_s for t in self.token_times_s]),
            ended_s=None if self.ended_s is None else self.ended_s - start_s,
            first_answer_s=None if self.first_answer_s is None else self.first_answer_s - start_s,
            text="",
            thought_chars=0,
            token_ids=(),
        )
