"""A scenario's workload as a source of requests: their text, their tokenizer, their lengths."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.lengths import parse_lengths, parse_seconds
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import Scenario
from lmi_bench.core.sessions import parse_agents, read_sessions
from lmi_bench.core.traces import RecordedConversation, read_conversations, read_trace
from lmi_bench.core.workload import LevelSpec, PlannedRequest, arrival_times_s
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.loadgen.prompts import dialogues
from lmi_bench.loadgen.prompts import prompts as sources
from lmi_bench.loadgen.prompts.agents import AgentSessions
from lmi_bench.models.folder import trained_folder

DEMO_NAMES: Final = ("demo-15m", "demo-110m")
DEMO_POSITIONS: Final = 2048
_MOST_TURNS: Final = 10_000


def weights_notes(model: str) -> list[str]:
    """What to know of a model's weights before its text is read."""
    return [f"{model} has random weights: its text means nothing"] if model in DEMO_NAMES else []


def lengths_of(scenario: Scenario) -> list[sources.Lengths]:
    """Prompt and output lengths of a synthetic workload's requests, with their shares."""
    workload = scenario.workload
    if workload.has_agents:
        return [AgentSessions.of(workload, sources.no_text, seed=scenario.seed).mean_lengths()]
    if workload.has_sessions:
        return [_mean_turn(scenario)]
    if workload.trace is not None:
        return [sources.mean_lengths(read_trace(Path(workload.trace)).requests)]
    if not workload.mix:
        return [sources.Lengths(*(round(each.mean) for each in sources.distributions(workload)))]
    return [sources.Lengths(one.input_tokens, one.output_tokens, one.share) for one in workload.mix]


def longest_request(scenario: Scenario) -> int:
    """Maximum tokens, input and output, of one request."""
    workload = scenario.workload
    if workload.has_agents:
        if workload.agent_trace is None:
            return parse_agents(workload.agents or "").context.most
        sessions = read_sessions(Path(workload.agent_trace))
        return max(each.input_tokens + each.output_tokens for some in sessions for each in some)
    if workload.conversations is not None:
        recorded = read_conversations(Path(workload.conversations))
        return max(_conversation_tokens(each, workload.output_tokens) for each in recorded)
    if workload.turns is not None:
        each = sum(distribution.most for distribution in sources.distributions(workload))
        return workload.shared_prefix + parse_lengths(workload.turns).most * each
    if workload.trace is not None:
        requests = read_trace(Path(workload.trace)).requests
        return max(request.input_tokens + request.output_tokens for request in requests)
    if workload.mix:
        return max(kind.input_tokens + kind.output_tokens for kind in workload.mix)
    return sum(each.most for each in sources.distributions(workload))


def _mean_turn(scenario: Scenario) -> sources.Lengths:
    """Mean lengths of a conversation's turns; on average half of the others precede a turn."""
    workload = scenario.workload
    if workload.conversations is not None:
        recorded = read_conversations(Path(workload.conversations))
        turns = sum(len(each.turns) for each in recorded) / len(recorded)
        said = [_conversation_tokens(each, workload.output_tokens) for each in recorded]
        each_way = sum(said) / sum(len(each.turns) for each in recorded) / 2
        new, answer = each_way, each_way
    else:
        turns = parse_lengths(workload.turns or "1").mean
        new, answer = (each.mean for each in sources.distributions(workload))
    before = workload.shared_prefix + (turns - 1) / 2 * (new + answer)
    return sources.Lengths(max(1, round(before + new)), max(1, round(answer)))


def _conversation_tokens(conversation: RecordedConversation, output_tokens: int) -> int:
    """Approximate tokens of a whole recorded conversation."""
    total = len(conversation.system) / sources.CHARACTERS_PER_TOKEN
    for turn in conversation.turns:
        total += len(turn.asked) / sources.CHARACTERS_PER_TOKEN + 1
        total += len(turn.answered) / sources.CHARACTERS_PER_TOKEN or output_tokens
    return math.ceil(total)


def make_prompts(
    scenario: Scenario, text: sources.PromptText, tokenizer: Tokenizer | None, salt: str
) -> sources.Prompts:
    """The scenario's prompts for a target."""
    workload = scenario.workload
    common: dict[str, Any] = {"seed": scenario.seed, "salt": salt, "ignore_eos": workload.ignore_eos}
    if workload.has_agents:
        return AgentSessions.of(workload, text, **common)
    if workload.has_sessions:
        return _dialogues(scenario, text, tokenizer, common)
    if workload.dataset is not None:
        return sources.DatasetPrompts(
            sources.load_dataset(Path(workload.dataset)),
            output_tokens=workload.output_tokens,
            tokenizer=tokenizer,
            **common,
        )
    options = common | {"shared_prefix": workload.shared_prefix, "corpus": workload.corpus}
    if workload.trace is not None:
        return sources.TracePrompts(read_trace(Path(workload.trace)), text, **options)
    if workload.input_lengths is not None or workload.output_lengths is not None:
        return sources.SyntheticPrompts(sources.DrawnLengths(*sources.distributions(workload)), text, **options)
    return sources.SyntheticPrompts(lengths_of(scenario), text, **options)


def _dialogues(
    scenario: Scenario, text: sources.PromptText, tokenizer: Tokenizer | None, common: dict[str, Any]
) -> sources.Prompts:
    workload = scenario.workload
    pauses = parse_seconds(workload.think_s or "0")
    if workload.conversations is not None:
        return dialogues.RecordedDialogues(
            read_conversations(Path(workload.conversations)),
            pauses,
            output_tokens=workload.output_tokens,
            tokenizer=tokenizer,
            **common,
        )
    lengths = sources.DrawnLengths(*sources.distributions(workload))
    first = replace(lengths, more_input=workload.shared_prefix)
    return dialogues.MadeUpDialogues(
        sources.SyntheticPrompts(first, text, shared_prefix=workload.shared_prefix, **common),
        sources.SyntheticPrompts(lengths, text, **common),
        dialogues.num_turns(workload, scenario.seed),
        pauses,
        seed=scenario.seed,
        tokenizer=tokenizer,
    )


def repeats_text(scenario: Scenario) -> bool:
    """Whether prompts begin alike, by design or as a trace records it."""
    workload = scenario.workload
    if workload.trace is not None and not workload.shared_prefix:
        return any(each.hash_ids for each in read_trace(Path(workload.trace)).requests)
    return workload.begins_alike


class PlannedPrompts:
    """A scenario's requests for simulations: with arrivals, and ids that tell equal text apart.

    A conversation's next turn comes after a pause behind its answer, which is taken to last
    `ANSWER_S` a token: arrivals do not depend on the simulated engine. Its earlier answers consist
    of token id 0, as the simulator's do.
    """

    ANSWER_S = 0.03

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._prompts = make_prompts(scenario, sources.distinct_ids, None, "")

    @property
    def mean_turns(self) -> float:
        """Mean number of requests of a conversation; 1 for single requests."""
        return parse_lengths(self.scenario.workload.turns or "1").mean

    def single(self, spec: LevelSpec, number: int) -> PlannedRequest:
        """The request of a number in a closed loop."""
        return self._prompts.request(spec, number)

    def at(self, rate_per_s: float, seed: int = 0) -> Callable[[int], PlannedRequest]:
        """The request of a number, of so many a second, for a load with a trace's arrivals."""
        load, prompts = self.scenario.load, self._prompts
        spec = LevelSpec(0, Load(rate_per_s=rate_per_s), duration_s=math.inf, repeat=seed)
        starts = Load(rate_per_s=rate_per_s / self.mean_turns, arrivals=load.arrivals, burstiness=load.burstiness)

        def stream() -> Iterator[PlannedRequest]:
            starts_s = arrival_times_s(starts, seed=seed)
            if isinstance(prompts, dialogues.Dialogues):
                return _turns(prompts, spec, starts_s)
            if isinstance(prompts, sources.TracePrompts):
                return map(partial(prompts.request, spec), count())
            return (replace(prompts.request(spec, number), arrival_s=at_s) for number, at_s in enumerate(starts_s))

        return _InOrder(stream)


class _InOrder:
    """Requests by number from a stream that begins again for an earlier one; only one is kept."""

    def __init__(self, stream: Callable[[], Iterator[PlannedRequest]]) -> None:
        self._begin, self._stream = stream, stream()
        self._number, self._kept = 0, next(self._stream)

    def __call__(self, number: int) -> PlannedRequest:
        if number < self._number:
            self._stream = self._begin()
            self._number, self._kept = 0, next(self._stream)
        while self._number < number:
            self._number, self._kept = self._number + 1, next(self._stream)
        return self._kept


def _dialogue(prompts: dialogues.Dialogues, spec: LevelSpec, session: int) -> Iterator[tuple[PlannedRequest, float]]:
    """The requests of a conversation, each with the seconds until the next one."""
    dialogue = prompts.begin(spec, session, session * _MOST_TURNS)
    following = dialogue.begin()
    while following:
        request = following[0].request
        tokens = request.output_tokens
        reply = Exchange(0.0, (0.0,), (tokens,), token_ids=(0,) * tokens)
        following = dialogue.after(request, reply)
        yield request, tokens * PlannedPrompts.ANSWER_S + sum(each.pause_s for each in following)


def _turns(prompts: dialogues.Dialogues, spec: LevelSpec, starts_s: Iterator[float]) -> Iterator[PlannedRequest]:
    """The requests of conversations that start at these times, in order of arrival."""
    due: list[tuple[float, int]] = []
    talks: dict[int, Iterator[tuple[PlannedRequest, float]]] = {}
    numbers = count()
    for session, start_s in enumerate(starts_s):
        talks[session] = _dialogue(prompts, spec, session)
        while due and due[0][0] <= start_s:
            at_s, talking = heappop(due)
            said = next(talks[talking], None)
            if said is None:
                del talks[talking]
                continue
            heappush(due, (at_s + said[1], talking))
            yield replace(said[0], request_id=next(numbers), arrival_s=at_s)
        heappush(due, (start_s, session))


def find_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model folder or a demo model; None if there is none. Loads no torch."""
    folder = trained_folder(model) or Path(model)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    if model in DEMO_NAMES:
        from lmi_bench.engine.torch_backend.demo_vocabulary import EOS_TOKEN_ID, demo_tokenizer_json

        return Tokenizer.from_json(demo_tokenizer_json(), eos_token_ids=(EOS_TOKEN_ID,))
    return None
