"""Agent sessions: order, fan-out, waits, shared text, sessions that begin in their middle."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
from itertools import pairwise

import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.scenario_sections import WorkloadSection
from lmi_bench.core.sessions import made_up, parse_agents, read_sessions
from lmi_bench.core.traces import read_trace
from lmi_bench.core.workload import LevelSpec, of_sessions
from lmi_bench.loadgen.prompts.agents import AgentSessions
from lmi_bench.loadgen.prompts.prompts import TokenIds
from lmi_bench.loadgen.run.sweep import levels_of, run_sweep

ANSWER_S = 0.5
IDS = TokenIds(50_000)


def call(t, ids, *, out=10, took=2.0):
    return {"t": t, "type": "s", "model": "m", "in": 64 * len(ids), "out": out, "hash_ids": ids, "api_time": took}


def agent(t, requests, **fields):
    return {"t": t, "type": "subagent", "agent_id": "a", "status": "completed", "requests": requests, **fields}


MAIN = [
    call(0.0, [1, 2]),
    agent(5.0, [call(0.0, [1, 7]), call(4.0, [1, 7, 8])]),
    agent(5.0, [call(0.0, [1, 9], took=3.0)]),
    agent(6.0, [call(0.0, [1, 5], took=60.0)], status="async_launched"),
    call(15.0, [1, 2, 3]),
    call(47.0, [1, 2, 3, 4]),
]


def written(tmp_path, requests, name="trace.json", **fields):
    path = tmp_path / name
    path.write_text(json.dumps({"id": name, "block_size": 64, "requests": requests, **fields}))
    return path


class Answering:
    """Answers in half a second."""

    def __init__(self, fail_at=None):
        self.asked, self.fail_at = [], fail_at

    async def send(self, request):
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        self.asked.append(request)
        await asyncio.sleep(ANSWER_S)
        if request.turn == self.fail_at:
            raise TargetError("server_error", "no more")
        return Exchange(sent_s, (loop.time(),), (request.output_tokens,), ended_s=loop.time())


def sessions_of(**workload):
    return AgentSessions.of(WorkloadSection(**workload), IDS, seed=3)


def swept(source, target=None, *, users=1, num_sessions=1, **fields):
    """The target with what it was asked, and the level's run."""
    target, runs = target or Answering(), []
    spec = LevelSpec(0, Load(users), num_requests=1, **fields)
    spec = of_sessions(spec, source.turns_at(spec), num_sessions=num_sessions)

    async def go():
        return await run_sweep(
            [spec],
            target,
            None,
            prompts=source,
            summarise=summarise_level,
            on_level=lambda run, _: runs.append(run),
            timeout_s=None,
            seed=0,
        )

    run_virtual(go())
    return target, runs[0]


def test_a_request_waits_for_its_parents_answer_and_for_the_sub_agents_between(tmp_path):
    """By hand: the two sub-agents begin 3 s after the first answer (5 - 2); the launched one 4 s.
    The next call follows the later of the waited ones: 5 + 4 + 2 = 11 recorded, so 4 s after it;
    the last 30 s after that (47 - 17)."""
    (session,) = read_sessions(written(tmp_path, MAIN))
    assert [each.after for each in session] == [(), (0,), (1,), (0,), (0,), (0, 2, 3), (5,)]
    assert [each.wait_s for each in session] == pytest.approx([0, 3, 2, 3, 4, 4, 30])


def test_times_inside_a_sub_agent_may_count_from_the_sessions_start(tmp_path):
    absolute = [call(0.0, [1]), agent(5.0, [call(5.0, [7]), call(9.0, [8])]), call(15.0, [2])]
    relative = [call(0.0, [1]), agent(5.0, [call(0.0, [7]), call(4.0, [8])]), call(15.0, [2])]
    assert read_sessions(written(tmp_path, absolute)) == read_sessions(written(tmp_path, relative))


def test_the_base_of_times_is_one_for_all_sub_agents(tmp_path):
    """The inner request began 0.1 s before its marker, 0.9 s after the answer at 99 s. Where times
    count from a sub-agent's own start, those of one that is idle for long do so, too."""
    absolute = [call(0.0, [1], took=99.0), agent(100.0, [call(99.9, [7])]), call(110.0, [2])]
    (session,) = read_sessions(written(tmp_path, absolute))
    assert session[1].wait_s == pytest.approx(0.9)
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("a", "b"):
        own = [call(0.0, [1]), agent(40.0, [call(0.0, [7])]), call(200.0, [2])]
        written(folder, own, f"{name}.json")
    idle = [call(0.0, [1]), agent(40.0, [call(50.0, [7])]), call(200.0, [2])]
    written(folder, idle, "c.json")
    assert [each[1].wait_s for each in read_sessions(folder)] == pytest.approx([38, 38, 88])


def test_a_session_begins_with_its_first_request_on_whatever_clock(tmp_path):
    def begun(at_s):
        later = [each | {"t": each["t"] + at_s} for each in MAIN]
        return [each.wait_s for (session,) in [read_sessions(written(tmp_path, later))] for each in session]

    assert begun(1_764_554_000) == pytest.approx(begun(0.0))
    assert begun(7.0) == pytest.approx(begun(0.0))


def test_idle_gaps_between_starts_are_shortened(tmp_path):
    """Starts 0, 5, 5, 5, 6, 9, 15, 47 s: only the last gap of 32 s is cut, to 10: 22 s less."""
    (session,) = read_sessions(written(tmp_path, MAIN), idle_cap_s=10)
    assert [each.wait_s for each in session] == pytest.approx([0, 3, 2, 3, 4, 4, 8])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"requests": [call(0.0, [1, 2]) | {"in": 999}]}, "do not fit blocks of 64"),
        ({"requests": [{"t": 0}]}, "cannot be read as sessions of Weka's"),
        ({"requests": 3}, "cannot be read as sessions of Weka's"),
        ([1], "cannot be read as sessions of Weka's"),
        ({"requests": []}, "holds no session"),
        ({"requests": [call(float("nan"), [1])]}, "must be finite"),
        ({"requests": [call(0, [1])], "block_size": 0}, "cannot be read as sessions of Weka's"),
        ({"requests": [call(0, [1])], "block_size": -64}, "do not fit blocks"),
        ({"requests": [call(0, [1]) | {"in": float("inf")}]}, "cannot be read as sessions of Weka's"),
        ({"requests": [call(0, [1]) | {"out": float("nan")}]}, "cannot be read as sessions of Weka's"),
    ],
)
def test_what_is_no_session_says_why(tmp_path, content, said):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=said):
        read_sessions(path)


def lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def chat(number, parent, at_s, asked, ids, answered=8):
    return {
        "chat_id": number,
        "parent_chat_id": parent,
        "timestamp": at_s,
        "turn": 1,
        "type": "text",
        "input_length": asked,
        "output_length": answered,
        "hash_ids": ids,
    }


def test_a_bailian_trace_is_conversations_by_its_parents(tmp_path):
    rows = [
        chat(1, -1, 10.0, 40, [7, 8, 9]),
        chat(2, -1, 11.0, 16, [7]),
        chat(3, 1, 15.5, 64, [7, 8, 9, 10]),
        chat(4, 1, 16.0, 50, [7, 8, 9, 11]),
        chat(5, 99, 17.0, 16, [12]),  # its parent is before the file
        chat(6, 3, 21.5, 70, [7, 8, 9, 10, 13]),
    ]
    sessions = read_sessions(lines(tmp_path / "b.jsonl", rows))
    assert [[each.after for each in session] for session in sessions] == [[(), (0,), (0,), (1,)], [()], [()]]
    assert [each.wait_s for each in sessions[0]] == pytest.approx([0.0, 5.5, 6.0, 6.0])
    assert sessions[0][3].parts[3:] == (("/10", 16), ("/13", 16))
    misfit = lines(tmp_path / "c.jsonl", [chat(1, -1, 0.0, 512, [1]), chat(2, -1, 1.0, 40, [1, 2, 3])])
    with pytest.raises(InputError, match="do not fit blocks of 16"):
        read_sessions(misfit)


@pytest.mark.parametrize("stated", [{}, {"block_size": 32}])
def test_what_is_read_as_a_trace_is_read_as_sessions(tmp_path, stated):
    """One of 400 requests does not fit, of its own conversation it is all; blocks may be of another
    size."""
    size = stated.get("block_size", 16)
    rows = [chat(n, -1, float(n), 2 * size, [2 * n, 2 * n + 1]) | stated for n in range(400)]
    rows[7]["hash_ids"] = [1, 2, 3, 4, 5]
    path = lines(tmp_path / "b.jsonl", rows)
    assert len(read_trace(path).requests) == len(read_sessions(path)) == 400
    weka = [{"requests": [call(0.0, [1, 2])]} for _ in range(400)]
    weka[7]["requests"][0]["hash_ids"] = [1]
    assert len(read_sessions(lines(tmp_path / "w.jsonl", weka))) == 400


def test_a_bailian_child_at_its_parents_time_or_of_an_unanswered_request_stays_in_its_conversation(tmp_path):
    rows = [
        chat(2, 1, 5.0, 32, [1, 2]) | {"turn": 2},
        chat(1, -1, 5.0, 16, [1]),
        chat(3, 2, 15.0, 48, [1, 2, 3], answered=0) | {"turn": 3},
        chat(4, 3, 25.0, 64, [1, 2, 3, 4]) | {"turn": 4},
    ]
    (session,) = read_sessions(lines(tmp_path / "b.jsonl", rows))
    assert [(each.input_tokens, each.after, each.wait_s) for each in session] == [
        (16, (), 0.0),
        (32, (0,), 0.0),
        (64, (1,), 20.0),
    ]


def test_ids_of_global_scope_are_equal_text_in_all_sessions(tmp_path):
    def parts(**scope):
        rows = [{"requests": [call(0.0, [1])], **scope} for _ in range(2)]
        return [each.parts for (each,) in read_sessions(lines(tmp_path / "g.jsonl", rows))]

    assert parts(hash_id_scope="global") == [(("/1", 64),)] * 2
    assert parts(hash_id_scope="local") == parts() == [(("1", 64),)] * 2
    with pytest.raises(InputError, match="must be local or global, got 'model'"):
        parts(hash_id_scope="model")


def test_equal_ids_of_two_bailian_conversations_are_equal_text_until_they_are_played_again(tmp_path):
    rows = [chat(1, -1, 0.0, 32, [7, 8]), chat(2, -1, 1.0, 32, [7, 9])]
    source = sessions_of(agent_trace=str(lines(tmp_path / "b.jsonl", rows)))
    spec = LevelSpec(0, Load(1), num_requests=1)
    texts = [source.begin(spec, session, 0).waiting[0][0].request.prompt_token_ids for session in range(4)]
    assert texts[0][:16] == texts[1][:16]
    assert texts[0][16:] != texts[1][16:]
    assert texts[2][:16] == texts[3][:16] != texts[0][:16]


def span(number, parent, start_s, end_s, asked=0, answered=0, trace="t", name="chat"):
    usage = {"gen_ai.usage.input_tokens": asked, "gen_ai.usage.output_tokens": answered}
    stated = [{"key": key, "value": {"intValue": str(value)}} for key, value in usage.items()]
    return {
        "traceId": trace,
        "spanId": number,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str(int((1.7e9 + start_s) * 1e9)),
        "endTimeUnixNano": str(int((1.7e9 + end_s) * 1e9)),
        "attributes": stated if asked else [],
    }


def test_a_trace_of_spans_is_a_session_of_its_model_calls(tmp_path):
    """A plan, two searches side by side, and a summary; a framework's span around the plan has its
    usage, too, and a tool has none."""
    spans = [
        span("run", "", 0, 30),
        span("chain", "run", 0, 2, 100, 10),
        span("plan", "chain", 0, 2, 100, 10),
        span("tool", "run", 2, 5),
        span("left", "run", 5, 8, 150, 20),
        span("right", "run", 5, 9, 90, 30),
        span("sum", "run", 12, 14, 400, 50),
        span("other", "", 3, 4, 70, 7, trace="u"),
    ]
    rows = [
        {"resourceSpans": [{"scopeSpans": [{"spans": spans[:4]}]}]},
        {"resourceSpans": [{"scopeSpans": [{"spans": spans[4:]}]}]},
    ]
    session, other = read_sessions(lines(tmp_path / "o.jsonl", rows))
    assert [each.after for each in session] == [(), (0,), (0,), (1, 2)]
    assert [each.wait_s for each in session] == pytest.approx([0, 3, 3, 3], abs=1e-6)
    assert session[1].parts == (("own0", 100), ("answer0", 10), ("own1", 40))
    assert session[2].parts == (("own2", 90),)  # shorter than what it waits for
    assert session[3].parts == (*session[1].parts, ("answer1", 20), ("own3", 230))
    assert [(each.input_tokens, each.output_tokens) for each in other] == [(70, 7)]


@pytest.mark.parametrize("name", ["invoke_agent searcher", "node"])
def test_the_calls_of_agents_side_by_side_follow_those_of_their_own(tmp_path, name):
    """Two sub-agents of a main one, marked as agents or not, as long as each other's."""
    spans = [
        span("run", "", 0, 20, name="invoke_agent main"),
        span("m1", "run", 0, 1, 100, 10),
        span("sa", "run", 1, 10, name=name),
        span("sb", "run", 1, 10, name=name),
        span("a1", "sa", 1, 3, 200, 10),
        span("a2", "sa", 3.5, 5, 250, 10),
        span("a3", "sa", 7, 8, 300, 10),
        span("b1", "sb", 1.5, 3.2, 210, 10),
        span("b2", "sb", 6, 9, 260, 10),
        span("m2", "run", 10, 11, 400, 10),
    ]
    rows = [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}]
    (session,) = read_sessions(lines(tmp_path / "o.jsonl", rows))
    m1, a1, b1, a2, b2, a3, m2 = session
    assert [set(each.after) for each in (a1, b1, a2, b2, a3)] == [{0}, {0}, {1}, {2}, {3}]
    assert set(m2.after) >= {4, 5}
    for one, other in ((a1, a2), (a2, a3), (b1, b2)):
        assert other.parts[: len(one.parts)] == one.parts, "an agent's own context"
    if name != "node":
        assert m2.parts[:1] == m1.parts
        assert m1.parts[0] not in (*a1.parts, *b1.parts), "a sub-agent has a context of its own"
        assert {*a1.parts, *b1.parts}.isdisjoint(m2.parts)


def test_what_a_tool_asks_of_a_model_is_no_context_of_its_agents(tmp_path):
    """OpenInference's names of the counts are read, too."""
    spans = [
        span("run", "", 0, 20, name="invoke_agent main"),
        span("m1", "run", 0, 1, 100, 10),
        span("tool", "run", 1, 6, name="execute_tool search"),
        span("t1", "tool", 2, 3, 40, 10),
        span("m2", "run", 7, 8, 200, 10),
    ]
    text = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    path = tmp_path / "o.json"
    for more in ((), ((".usage.input_tokens", "prompt"), (".usage.output_tokens", "completion"))):
        for name, count in more:
            text = text.replace(f"gen_ai{name}", f"llm.token_count.{count}")
        path.write_text(text)
        ((m1, t1, m2),) = read_sessions(path)
        assert (t1.after, m2.after) == ((0,), (1,))
        assert m2.parts == (*m1.parts, ("answer0", 10), ("own2", 90))


def test_what_an_exporter_writes_beside_spans_is_passed_over(tmp_path):
    rows = [
        {"resourceMetrics": []},
        {"resourceSpans": [{"resource": {}}, {"scopeSpans": [{"scope": {}}]}]},
        {"resourceSpans": [{"scopeSpans": [{"spans": [span("a", "", 0, 1, 100, 10)]}]}]},
    ]
    ((only,),) = read_sessions(lines(tmp_path / "o.jsonl", rows))
    assert (only.input_tokens, only.output_tokens) == (100, 10)


def test_no_request_leaves_before_the_answers_it_waits_for_and_fans_leave_together(tmp_path):
    source = sessions_of(agent_trace=str(written(tmp_path, MAIN)))
    _, run = swept(source)
    by_turn = {record.turn: record for record in run.records}
    (session,) = read_sessions(written(tmp_path, MAIN))
    for turn, each in enumerate(session):
        ended_s = max((by_turn[parent].ended_s for parent in each.after), default=0.0)
        assert by_turn[turn].sent_s == pytest.approx(ended_s + each.wait_s, abs=1e-6)
    assert by_turn[1].sent_s == by_turn[3].sent_s
    assert {record.of_turns for record in run.records} == {7}


def test_a_failed_request_ends_its_session(tmp_path):
    source = sessions_of(agent_trace=str(written(tmp_path, MAIN)))
    _, run = swept(source, Answering(fail_at=2))
    assert {record.turn for record in run.records} == {0, 1, 2, 3, 4}
    assert summarise_level(run).sessions.finished == 0


def test_a_failed_request_frees_its_lane_whatever_its_siblings_wait_for(tmp_path):
    """Of two sub-agents one fails at 2.0 s, while the other one is in a tool wait of 5 s; the
    lane's next session begins then, on the clock."""
    fan = [agent(1.0, [call(0.0, [2], took=1.0)]), agent(1.0, [call(0.0, [3], took=1.0)])]
    fan[1]["requests"].append(call(6.0, [3, 4], took=1.0))

    class FirstFails(Answering):
        async def send(self, request):
            if (request.session, request.turn) == (0, 1):
                await asyncio.sleep(1.5)
                raise TargetError("server_error", "no more")
            return await super().send(request)

    source = sessions_of(agent_trace=str(written(tmp_path, [call(0.0, [1], took=1.0), *fan])))
    _, run = swept(source, FirstFails(), num_sessions=2)
    (begun,) = [each for each in run.records if (each.session, each.turn) == (1, 0)]
    assert (begun.due_s, begun.sent_s) == pytest.approx((2.0, 2.0))
    assert run.check.dispatch_delay_max_s == pytest.approx(0.0)
    assert run.check.valid, run.check.reason


def test_lanes_play_sessions_one_after_another(tmp_path):
    """Two lanes, four plays: the plays of a lane do not overlap; all are finished."""
    source = sessions_of(agent_trace=str(written(tmp_path, MAIN)))
    _, run = swept(source, users=2, num_sessions=4)
    spans = {}
    for record in run.records:
        spans.setdefault(record.session, []).append((record.due_s, record.ended_s))
    begun = sorted((min(x[0] for x in each), max(x[1] for x in each)) for each in spans.values())
    assert sum(begun[k + 2][0] >= begun[k][1] for k in range(2)) == 2
    found = summarise_level(run).sessions
    assert (found.started, found.finished) == (4, 4)


def blocks(request, size=64):
    """The request's full blocks as an independent reader hashes them: content and all before it."""
    ids, seen, found = list(request.prompt_token_ids), hashlib.sha256(), []
    for at in range(0, len(ids) // size * size, size):
        seen.update(json.dumps(ids[at : at + size]).encode())
        found.append(seen.hexdigest())
    return found


def test_made_up_sessions_grow_share_their_instructions_and_repeat_by_seed():
    shape = parse_agents("steps=6,fan_chance=0.5,context=20000")
    one, other = made_up(shape, 0, 1), made_up(shape, 0, 2)
    assert one == made_up(shape, 0, 1) != other
    assert one[0].parts[0] == other[0].parts[0] == ("/system", 4000)
    assert all(each.input_tokens + each.output_tokens <= 20_000 for each in (*one, *other))
    short = made_up(parse_agents("steps=30,context=9000"), 0, 1)
    assert max(each.input_tokens + each.output_tokens for each in short) in range(6000, 9001)
    main = [each for each in one if each.parts[1][0] == "task"]
    assert len(main) == 6
    for earlier, later in pairwise(main):
        assert later.parts[: len(earlier.parts)] == earlier.parts
        assert later.input_tokens > earlier.input_tokens
    for session in (one, other):
        assert all(parent < number for number, e in enumerate(session) for parent in e.after)
    fans = [e for e in one if e.after and e.parts[1][0] != "task" and len(e.parts) == 2]
    assert fans
    assert all(len({e.wait_s for e in fans if e.after == f.after}) == 1 for f in fans)


def test_a_chance_of_one_may_have_a_point():
    assert parse_agents("fan_chance=1.0") == parse_agents("fan_chance=1")


@pytest.mark.parametrize("text", ["step=3", "steps=none", "fan_chance=2", "wait=-1"])
def test_a_shape_that_cannot_be_read_says_so(text):
    with pytest.raises(InputError):
        parse_agents(text)


def test_sessions_begun_within_start_at_a_request_whose_past_was_primed():
    source = sessions_of(agents="steps=8,fan_chance=0", begins_within=True)
    target, run = swept(source, users=4, num_sessions=6, warmup_requests=4)
    primed = [each for each in target.asked if each.session is None]
    firsts = {}
    for each in target.asked:
        if each.session is not None:
            firsts.setdefault(each.session, each)
    assert [each.output_tokens for each in primed] == [1] * 4
    assert {firsts[session].turn for session in (4, 5)} == {0}
    assert any(firsts[session].turn for session in range(4))
    for session in range(4):
        first = firsts[session]
        assert run.records  # the first was due at once, whatever it waited for when recorded
        record = next(r for r in run.records if r.session == session and r.turn == first.turn)
        assert record.due_s < 1
        (past,) = (p for p in primed if p.request_id == -1 - session)
        asked = source.sessions(session)
        before = asked[max(0, first.turn - 1)]
        assert past.input_tokens == before.input_tokens
        assert blocks(past) == blocks(first)[: len(blocks(past))], "what it had sent before"


def test_all_that_a_lane_had_sent_before_and_needs_again_is_primed():
    """Also the contexts of sub-agents that go on, and of their parent."""
    workload = {"agents": "steps=6,fan_chance=0.6", "begins_within": True}
    scenario = parse_scenario({"workload": workload, "load": {"concurrency": 6}, "seed": 3})
    (spec,) = levels_of(scenario)
    target, _ = swept(sessions_of(**workload), users=6, num_sessions=6, warmup_requests=spec.warmup_requests)
    primed = {each for one in target.asked if one.session is None for each in blocks(one)}
    whole, needed = sessions_of(agents=workload["agents"]), set()
    for session in range(6):
        sent = {one.turn: blocks(one) for one in target.asked if one.session == session}
        play = whole.begin(spec, session, 0)
        everything = [one.request for one, _ in play.waiting.values()]
        before = {each for one in everything if one.turn not in sent for each in blocks(one)}
        needed |= before & {each for found in sent.values() for each in found}
    assert len(needed) > 6 * 4000 // 64
    assert needed <= primed
    assert spec.warmup_requests < 6 * 4, "not all that was sent is needed"


def test_the_time_to_finish_is_that_of_sessions_that_began_at_their_beginning():
    source = sessions_of(agents="steps=8,fan_chance=0", begins_within=True)
    _, run = swept(source, users=4, num_sessions=6)
    began = {each.session: each.due_s for each in reversed(run.records) if each.turn == 0}
    ended = {each.session: each.ended_s for each in run.records}  # the last of each
    found = summarise_level(run).sessions
    assert found.finished == 6 > len(began) == found.time_to_finish_ms.n
    took_ms = [1000 * (ended[session] - at_s) for session, at_s in began.items()]
    assert found.time_to_finish_ms.mean == pytest.approx(sum(took_ms) / len(took_ms))


@pytest.mark.parametrize(("begins_within", "asked_before"), [(True, 0), (False, 2)])
def test_a_cache_is_emptied_before_it_is_primed_but_after_another_warm_up(begins_within, asked_before):
    class AtOnce:
        asked = 0

        async def send(self, request):
            self.asked += 1
            now_s = asyncio.get_running_loop().time()
            return Exchange(now_s, (now_s,), (request.output_tokens,), ended_s=now_s)

    target, emptied = AtOnce(), []
    spec = LevelSpec(0, Load(2, sessions=True), num_requests=2, num_sessions=2, warmup_requests=2)
    source = sessions_of(agents="steps=1", begins_within=begins_within)
    levels = run_sweep(
        [spec],
        target,
        None,
        prompts=source,
        summarise=summarise_level,
        before_level=lambda: emptied.append(target.asked),
    )
    asyncio.run(levels)  # a thread empties the cache, for which virtual time does not wait
    assert emptied == [asked_before]
    assert target.asked == 4


@pytest.mark.parametrize("recorded", [True, False])
def test_a_worker_process_gets_the_same_sessions(tmp_path, recorded):
    """Workers get the source pickled."""
    source = sessions_of(**({"agent_trace": str(written(tmp_path, MAIN))} if recorded else {"agents": "steps=3"}))
    sent = pickle.loads(pickle.dumps(source))
    spec = LevelSpec(0, Load(2), num_requests=1)
    assert all(sent.sessions(n) == source.sessions(n) for n in range(5))
    one, other = (each.begin(spec, 1, 7).begin()[0].request for each in (source, sent))
    assert one == other


@pytest.mark.parametrize("workload", [{"agents": "steps=3,fan_chance=0"}, None])
def test_a_warm_up_is_in_no_cache_of_the_level(tmp_path, workload):
    """But for the instructions, 4,000 tokens that all sessions share."""
    workload = workload or {"agent_trace": str(written(tmp_path, MAIN))}
    target, _ = swept(sessions_of(**workload), users=2, num_sessions=3, warmup_requests=2)
    warm = {h for each in target.asked if each.session is None for h in blocks(each)}
    sent = {h for each in target.asked if each.session is not None for h in blocks(each)}
    assert warm
    assert len(warm & sent) == (4000 // 64 if "agents" in workload else 0)
