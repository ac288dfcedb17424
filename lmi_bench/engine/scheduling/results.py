"""What an executor returns for a step: checked, and added to its sequence."""

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.batch import BatchEntry, CommittedTokens, StepKind, StepOutput
from lmi_bench.engine.scheduling.sequence import Sequence
from lmi_bench.engine.scheduling.stats import SchedulerStats


def check_output(entry: BatchEntry, output: StepOutput) -> None:
    """Raise EngineError if the output is not one that this entry can have."""
    count = len(output.token_ids)
    if entry.kind is StepKind.VERIFY:
        right = count <= entry.draft_length + 1
    else:
        right = count == entry.samples
    if not right or output.seq_id != entry.seq_id:
        raise EngineError(
            f"the executor returned {count} tokens of sequence {output.seq_id} for the "
            f"{entry.kind} of sequence {entry.seq_id}"
        )


def accept(
    seq: Sequence, output: StepOutput, drafted: int, stats: SchedulerStats
) -> CommittedTokens:
    """Append the new tokens to their sequence, up to one that ends it, and count them."""
    outputs = seq.output_token_ids
    token_ids, logprobs, ranked = output.token_ids, output.logprobs, output.top_logprobs
    reason = None
    for count, token_id in enumerate(token_ids, start=1):
        outputs.append(token_id)
        reason = seq.end_reason(token_id, len(outputs))
        if reason is not None:
            token_ids = token_ids[:count]
            logprobs = None if logprobs is None else logprobs[:count]
            ranked = None if ranked is None else ranked[:count]
            break
    # one of the output tokens is the model's own, not a draft token
    held = min(len(token_ids), len(output.token_ids) - 1) if drafted else 0
    if drafted:
        stats.drafts += 1
        seq.num_accepted += len(output.token_ids) - 1
        seq.num_rejected += len(output.token_ids) <= drafted
    stats.generation_tokens += len(token_ids)
    stats.drafted_tokens += drafted
    stats.accepted_tokens += held
    return CommittedTokens(seq.seq_id, token_ids, logprobs, reason, drafted, held, ranked)
