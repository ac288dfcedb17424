"""Conversations: order, pauses, growing context, and the two caps beside each other."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.lengths import parse_seconds
from lmi_bench.core.load import Load
from lmi_bench.core.traces import read_conversations
from lmi_bench.core.workload import LevelSpec, of_sessions
from lmi_bench.loadgen.prompts.dialogues import MadeUpDialogues, RecordedDialogues
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, TokenIds, common_words, no_text
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.wire.openai import OpenAiChatFormat

ANSWER_S = 0.5


class Answering:
    """Answers in half a second with `output_tokens` tokens; keeps what it was asked."""

    def __init__(self, fail_at=None):
        self.asked = []
        self.running = 0
        self.most = 0
        self.fail_at = fail_at

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(ANSWER_S)
        self.running -= 1
        if request.request_id == self.fail_at:
            raise TargetError("server_error", "no more")
        n = request.output_tokens
        return Exchange(
            sent_s,
            (loop.time(),),
            (n,),
            text=f"answer {request.request_id}",
            token_ids=tuple(range(n)),
            ended_s=loop.time(),
        )


def dialogues(text=None, *, turns=3, pause="2", prefix=0):
    first, later = (
        SyntheticPrompts([Lengths(10, 4)], text or no_text, seed=0, shared_prefix=tokens) for tokens in (prefix, 0)
    )
    return MadeUpDialogues(first, later, lambda _: turns, parse_seconds(pause), seed=0)


def sweep(target, source, *, num_sessions=2, concurrency=None, rate_per_s=None, **fields):
    """The one level's run, and its line."""
    runs = []
    load = Load(concurrency, rate_per_s, arrivals="constant")
    fields = {"num_requests": 1, **fields}
    spec = of_sessions(
        LevelSpec(0, load, **fields),
        source.num_turns,
        num_sessions=num_sessions,
        max_sessions=fields.pop("max_sessions", None),
    )
    result = run_virtual(
        run_sweep(
            [spec],
            target,
            None,
            prompts=source,
            summarise=summarise_level,
            on_level=lambda run, _line: runs.append(run),
        )
    )
    return runs[0], result[0]


def test_a_turn_leaves_the_think_time_after_the_answer_before_it_and_never_sooner():
    run, line = sweep(Answering(), dialogues(), concurrency=2)
    assert line.requests == 6
    for session in (0, 1):
        turns = [record for record in run.records if record.session == session]
        assert [record.turn for record in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert after.sent_s - before.ended_s == pytest.approx(2.0, abs=1e-9)
            assert after.due_s == pytest.approx(after.sent_s)
    assert line.sessions.started == 2
    assert line.sessions.ttft_later_turns_ms.n == 4
    assert line.valid


def test_each_turn_asks_with_all_that_was_said_before():
    """10 new tokens a turn and 4 of each answer: 10, 24 and 38 in."""
    target = Answering()
    run, _ = sweep(target, dialogues(), concurrency=1, num_sessions=1)
    assert [record.input_tokens for record in run.records] == [10, 24, 38]


def test_token_ids_of_a_turn_begin_with_those_of_the_turn_before_and_its_answer():
    target = Answering()
    sweep(target, dialogues(TokenIds(1000)), concurrency=1, num_sessions=1)
    first, second, third = (request.prompt_token_ids for request in target.asked)
    assert second[:14] == (*first, 0, 1, 2, 3)
    assert third[:28] == (*second, 0, 1, 2, 3)
    assert len(third) == 38


def test_a_chat_gets_its_messages_with_the_answers_that_came():
    target = Answering()
    sweep(target, dialogues(common_words), concurrency=1, num_sessions=1)
    body = json.loads(OpenAiChatFormat().request_body(target.asked[-1], model="m"))
    assert [message["role"] for message in body["messages"]] == [*("user", "assistant", "user", "assistant", "user")]
    assert [m["content"] for m in body["messages"] if m["role"] == "assistant"] == ["answer 0", "answer 1"]
    assert target.asked[-1].prompt_text.startswith(target.asked[0].prompt_text + "answer 0")


def test_what_was_thought_is_no_part_of_the_next_turn():
    """Chat servers want the answers alone back: 3 of 4 tokens were thoughts."""

    class Thinking(Answering):
        async def send(self, request):
            exchange = await super().send(request)
            thought = "let me see. "
            return replace(exchange, text=thought + exchange.text, thought_chars=len(thought), reasoning_tokens=3)

    target = Thinking()
    run, _ = sweep(target, dialogues(common_words), concurrency=1, num_sessions=1)
    said = [text for role, text in target.asked[-1].messages if role == "assistant"]
    assert said == ["answer 0", "answer 1"]
    assert "let me see" not in target.asked[-1].prompt_text
    assert [record.input_tokens for record in run.records] == [10, 21, 32]


def test_the_cap_on_requests_stands_beside_the_cap_on_conversations():
    """Six conversations think most of the time; at most two requests run at once."""
    target = Answering()
    run, line = sweep(target, dialogues(pause="0"), num_sessions=6, concurrency=6, max_in_flight=2)
    assert target.most == 2
    assert line.held.requests > 0
    assert line.valid, line.invalid_reason
    assert max(record.exchange.held_s for record in run.records) == pytest.approx(2 * ANSWER_S)


def test_conversations_of_a_rate_wait_for_their_cap():
    """Ten a second would be ten at once; two are, so the fourth begins at 3 answers' time."""
    target = Answering()
    run, line = sweep(target, dialogues(turns=1), num_sessions=4, rate_per_s=10.0, max_sessions=2)
    assert target.most == 2
    assert [record.sent_s for record in run.records] == pytest.approx([0.0, 0.1, 0.5, 0.6])
    assert line.sessions.started == 4


def test_a_failed_turn_ends_its_conversation_alone():
    run, line = sweep(Answering(fail_at=1), dialogues(), num_sessions=2, concurrency=1)
    assert [(record.session, record.turn) for record in run.records] == [*((0, 0), (0, 1)), *((1, 0), (1, 1), (1, 2))]
    assert line.sessions.failed == 1


def test_a_level_that_ends_by_time_cuts_conversations_between_turns():
    """Turns are due at 0, 2.5, 5.0: of a level of 4 s the third is not sent."""
    run, _ = sweep(Answering(), dialogues(), num_sessions=None, num_requests=None, concurrency=1, duration_s=4.0)
    assert [record.turn for record in run.records] == [0, 1]


def test_only_what_a_conversation_begins_with_has_the_shared_prefix():
    target = Answering()
    source = dialogues(TokenIds(100_000), prefix=6)
    sweep(target, source, concurrency=1, num_sessions=2)
    firsts = [request.prompt_token_ids for request in target.asked if request.turn == 0]
    assert firsts[0][:6] == firsts[1][:6]
    assert firsts[0][6:] != firsts[1][6:]
    later = [request.prompt_token_ids[-10:] for request in target.asked if request.turn]
    assert all(words[:6] != firsts[0][:6] for words in later)


SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is a knee?"},
        {"from": "gpt", "value": "The point where a curve bends, four times four."},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "Queues."},
    ],
}
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}


def test_recorded_conversations_of_both_kinds_are_read(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(SHAREGPT) + "\n" + json.dumps(MESSAGES) + "\n")
    first, second = read_conversations(path)
    assert [turn.asked for turn in first.turns] == ["What is a knee?", "Why?"]
    assert first.system == "Be brief."
    assert second.turns[0].answered == "Hi!"
    path.write_text(json.dumps([SHAREGPT, MESSAGES]))
    assert read_conversations(path) == (first, second)


def test_parts_of_text_are_read_and_a_call_of_a_tool_is_passed_over(tmp_path):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "c"},
    ]
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    ((turn,),) = (each.turns for each in read_conversations(path))
    assert (turn.asked, turn.answered) == ("a\nb", "c")


def test_a_call_of_a_tool_needs_no_content(tmp_path):
    """OpenAI's API asks for none beside tool_calls; a message with neither is named."""
    path = tmp_path / "tools.jsonl"
    call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    told = [{"role": "tool", "content": "12"}, {"role": "assistant", "content": "It is 12."}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Time?"}, call, *told]}))
    ((turn,),) = (each.turns for each in read_conversations(path))
    assert (turn.asked, turn.answered) == ("Time?", "It is 12.")
    path.write_text('{"messages": [{"role": "user"}]}')
    with pytest.raises(InputError, match="entry 1 cannot be read"):
        read_conversations(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no conversation"),
        ("{", "neither JSON lines"),
        ('{"prompt": "a"}', "neither `conversations`"),
        ('{"messages": [{"role": "user", "content": 3}]}', "entry 1"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no conversation"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, text, said):
    path = tmp_path / "c.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_conversations(path)


def test_a_replay_goes_on_from_the_answers_it_gets_and_asks_for_the_recorded_lengths(tmp_path):
    """47 characters were answered: 12 tokens at four characters each."""
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(SHAREGPT))
    source = RecordedDialogues(read_conversations(path), parse_seconds("1"), output_tokens=9, seed=0, salt="s")
    target = Answering()
    run, _ = sweep(target, source, concurrency=1, num_sessions=1)
    assert [request.output_tokens for request in target.asked] == [12, 2]
    assert [role for role, _ in target.asked[1].messages] == [*("system", "user", "assistant", "user")]
    assert target.asked[1].messages[2] == ("assistant", "answer 0")
    assert target.asked[0].messages[0][1] == "[s-0-0] Be brief."
    assert run.records[1].sent_s - run.records[0].ended_s == pytest.approx(1.0)


def test_a_conversation_of_lmsys_is_read(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"conversation_id": "x", "model": "m", "conversation": MESSAGES["messages"]}))
    ((turn,),) = (each.turns for each in read_conversations(path))
    assert (turn.asked, turn.answered) == ("Hello", "Hi!")
