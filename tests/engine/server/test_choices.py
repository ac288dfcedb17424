"""`n` and `echo` of the OpenAI routes over a real engine."""

import asyncio
import json
from collections import Counter

import pytest

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.replicas import ReplicaGroup
from lmi_bench.engine.router import RoundRobin
from lmi_bench.engine.scheduling.batch import StepOutput
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.server.answer import Prompt
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.engine.server.state import ServerState
from lmi_bench.engine.server.streaming import submit_choices
from lmi_bench.engine.simulated import SimulatedExecutor

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def events_of(body):
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


class OwnTokens:
    """Sequence s gives the tokens 100 s + 1, 100 s + 2 ... and ends after s + 2 of them."""

    block_size = 16
    max_in_flight = 1

    def __init__(self):
        self.prompt_tokens = []

    async def execute(self, batch):
        await asyncio.sleep(0)
        outputs = []
        for entry in batch.entries:
            if entry.kind == "prefill":
                self.prompt_tokens.append(len(entry.token_ids))
            number = entry.num_generated + 1
            token_id = 100 * entry.seq_id + number
            if number == entry.seq_id + 2:
                token_id = entry.sampling.stop_token_ids[0]
            outputs.append(StepOutput(entry.seq_id, (token_id,)))
        return outputs

    async def close(self):
        pass


def own_tokens(**settings):
    return {"executor": OwnTokens(), **settings}


def post(serve_toy, path, call, **settings):
    async def main():
        async with serve_toy(**settings) as server:
            return await server.post(path, call)

    return asyncio.run(main())


CALL = {"prompt": "a b c", "max_tokens": 9, "n": 3, "stop_token_ids": [7]}


def test_every_choice_has_its_index_and_usage_counts_the_prompt_once(serve_toy):
    """2, 3 and 4 tokens, the stop tokens among them: 9 of the three choices behind 3."""
    status, _, body = post(serve_toy, COMPLETIONS, CALL, **own_tokens())
    assert status == 200
    reply = json.loads(body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in reply["choices"]] == [" t1", " t101 t102", " t201 t202 t203"]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}


def test_streamed_choices_come_side_by_side_and_each_ends_for_itself(serve_toy):
    call = CALL | {"stream": True, "stream_options": {"include_usage": True}}
    _, _, body = post(serve_toy, COMPLETIONS, call, **own_tokens())
    *chunks, usage = events_of(body)
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert Counter(order) == {0: 2, 1: 3, 2: 4}
    assert order.index(2) < len(order) - 1 - order[::-1].index(1)  # side by side
    texts = {0: "", 1: "", 2: ""}
    ends = Counter()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert not ends[choice["index"]]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == {0: " t1", 1: " t101 t102", 2: " t201 t202 t203"}
    assert ends == {0: 1, 1: 1, 2: 1}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9


def test_each_choice_of_a_chat_begins_with_its_role(serve_toy):
    call = {"messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 2}
    whole = post(serve_toy, CHAT, call)
    stream = post(serve_toy, CHAT, call | {"stream": True})
    choices = json.loads(whole[2])["choices"]
    assert [(choice["index"], choice["message"]["role"]) for choice in choices] == [(0, "assistant"), (1, "assistant")]
    first = {}
    for event in events_of(stream[2]):
        (choice,) = event["choices"]
        first.setdefault(choice["index"], choice["delta"])
    assert first == {number: {"role": "assistant", "content": ""} for number in (0, 1)}


def test_offsets_of_log_probabilities_are_each_choices_own(serve_toy, scripted):
    call = {"prompt": "a", "n": 2, "max_tokens": 2, "logprobs": 1}
    _, _, body = post(serve_toy, COMPLETIONS, call, executor=scripted([11, 12]))
    for choice in json.loads(body)["choices"]:
        assert choice["logprobs"]["text_offset"] == [0, 4]


def submitted_seeds(serve_toy, fields):
    """The seeds that the engine is asked with, in order."""
    seeds = []

    async def main():
        async with serve_toy() as server:
            submit = server.engine.submit

            def noted(token_ids, sampling, **options):
                seeds.append(sampling.seed)
                return submit(token_ids, sampling, **options)

            server.engine.submit = noted
            await server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1} | fields)

    asyncio.run(main())
    return seeds


def test_choices_draw_apart_and_the_first_as_the_request_alone(serve_toy):
    assert submitted_seeds(serve_toy, {"seed": 5}) == [5]
    assert submitted_seeds(serve_toy, {"seed": 5, "n": 3}) == [5, 6, 7]
    assert submitted_seeds(serve_toy, {"n": 2}) == [None, None]  # the engine's own, by sequence


@pytest.mark.parametrize(("prefix_caching", "computed"), [(True, [40, 8, 8]), (False, [40, 40, 40])])
def test_a_prompt_is_computed_once_where_its_blocks_are_kept(serve_toy, prefix_caching, computed):
    """40 tokens are two blocks of 16 and 8 more: those alone are computed for each choice."""
    executor = OwnTokens()
    call = CALL | {"prompt": list(range(40))}
    status, _, _ = post(serve_toy, COMPLETIONS, call, executor=executor, prefix_caching=prefix_caching)
    assert status == 200
    assert executor.prompt_tokens == computed


def test_choices_stay_with_the_replica_that_has_their_prompt():
    """Two replicas in turn: without shared blocks the four choices are spread over both."""

    class Step:
        def step_time_s(self, shape):
            return 0.0001

    async def replicas_of(prefix_caching):
        config = SchedulerConfig(num_blocks=64, prefix_caching=prefix_caching)
        engines = [AsyncEngine(Scheduler(config), SimulatedExecutor(Step())) for _ in range(2)]
        async with ReplicaGroup(engines, RoundRobin()) as group:
            state = ServerState(group, PlainTokenizer(), "toy", 512, 32_000)
            sampling = SamplingParams(max_new_tokens=3, temperature=1.0)
            answers = await submit_choices(state, Prompt(range(40), sampling), 4)
            for answer in answers:
                await answer.complete()
            return [answer.generation.replica for answer in answers]

    assert asyncio.run(replicas_of(True)) == [0, 0, 0, 0]
    assert asyncio.run(replicas_of(False)) == [0, 1, 0, 1]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_choices_for_which_there_is_no_room_are_refused_together(serve_toy, slow_steps, stream, prefix_caching):
    """Room for 3: one other request and 3 choices are one too many, and nothing of them stays."""
    call = {"prompt": "a " * 20, "max_tokens": 30, "n": 3, "stream": stream}

    async def main():
        async with serve_toy(executor=slow_steps, max_concurrent_requests=3, prefix_caching=prefix_caching) as server:
            other = {"prompt": "b", "max_tokens": 10}
            first = asyncio.create_task(server.post(COMPLETIONS, other))
            await server.until(lambda: server.scheduler.num_running == 1)
            refused = await server.post(COMPLETIONS, call)
            left = server.scheduler.num_running + server.scheduler.num_waiting
            await first
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            server.engine.audit()
            several = await server.post(COMPLETIONS, call | {"prompt": ["a", "b"], "n": 2})
            return refused, left, await server.post(COMPLETIONS, call | {"n": 4}), several

    refused, left, never, several = asyncio.run(main())
    assert refused[0] == 503
    assert left == 1
    assert never[0] == 400
    assert "4 choices are 4 requests" in json.loads(never[2])["error"]["message"]
    assert (several[0], b"4 choices are 4 requests" in several[2]) == (400, True)


def test_a_client_that_leaves_frees_every_choice(serve_toy, slow_steps):
    async def main():
        async with serve_toy(executor=slow_steps) as server:
            call = {"prompt": "a", "max_tokens": 400, "n": 3, "stream": True}
            async with server.client.post(COMPLETIONS, json=call) as response:
                await response.content.readline()
                running = server.scheduler.num_running
                response.close()
            await server.until(lambda: server.scheduler.blocks.num_used == 0)
            server.scheduler.audit()
            async with server.client.get("/metrics") as response:
                return running, await response.text()

    running, metrics = asyncio.run(main())
    assert running == 3
    assert 'finished_reason="abort"} 3' in metrics


@pytest.mark.parametrize(("fails_at_step", "status"), [(0, 500), (2, 200)])
def test_an_engine_that_fails_ends_all_choices_with_one_error(serve_toy, scripted, fails_at_step, status):
    call = {"prompt": "a", "n": 2, "max_tokens": 9, "stream": True}
    executor = scripted([11], fails_at_step=fails_at_step)
    got, _, body = post(serve_toy, COMPLETIONS, call, executor=executor)
    assert got == status
    if status == 500:
        assert json.loads(body)["error"]["message"] == "a rank died"
        return
    *chunks, error = events_of(body)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1] * fails_at_step
    assert error["error"]["message"] == "a rank died"


@pytest.mark.parametrize("prompt", ["one  two", ["one  two"], [4, 5]])
def test_an_echo_puts_the_prompt_before_every_choice(serve_toy, scripted, prompt):
    """As it was sent, two spaces and all; of token ids their text."""
    shown = " t4 t5" if prompt == [4, 5] else "one  two"
    call = {"prompt": prompt, "max_tokens": 2, "n": 2, "echo": True}

    async def main():
        async with serve_toy(executor=scripted([11, 12])) as server:
            whole = await server.post(COMPLETIONS, call)
            stream = await server.post(COMPLETIONS, call | {"stream": True})
            cut = await server.post(COMPLETIONS, call | {"truncate_prompt_tokens": 1})
            return whole, stream, cut

    whole, stream, cut = asyncio.run(main())
    reply = json.loads(whole[2])
    assert [choice["text"] for choice in reply["choices"]] == [shown + " t11 t12"] * 2
    assert reply["usage"]["completion_tokens"] == 4
    texts = ["", ""]
    for event in events_of(stream[2]):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [shown + " t11 t12"] * 2
    last = PlainTokenizer().encode("two")[0] if prompt != [4, 5] else 5
    assert json.loads(cut[2])["choices"][0]["text"] == f" t{last} t11 t12"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 129}, "n must be at most 128, got 129"),
        ({"n": "2"}, 'n must be an integer, got "2"'),
        ({"n": 2, "best_of": 3}, "best_of=3 with n=2 is not supported"),
        ({"echo": "yes"}, 'echo must be true or false, got "yes"'),
        ({"echo": True, "logprobs": 1}, "no log-probabilities of prompts"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
        ({"frequency_penalty": "much"}, "frequency_penalty must be a number"),
    ],
)
def test_a_value_that_cannot_be_is_one_clear_error(serve_toy, fields, message):
    status, _, body = post(serve_toy, COMPLETIONS, {"prompt": "a"} | fields)
    assert status == 400
    assert message in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("kept", [True, False])
def test_the_string_that_ended_an_answer_is_kept_where_asked_for(serve_toy, scripted, byte_codec, kept):
    async def main():
        async with serve_toy(executor=scripted([*b"abc", 0]), codec=byte_codec) as server:
            wish = {"include_stop_str_in_output": kept}
            openai = {"prompt": "x", "stop": "bc", "max_tokens": 9} | wish
            lmi = {"inputs": "x", "parameters": {"stop_sequences": ["bc"]} | wish}
            return await server.post(COMPLETIONS, openai), await server.post("/invocations", lmi)

    completion, lmi = asyncio.run(main())
    expected = "abc" if kept else "a"
    assert json.loads(completion[2])["choices"][0]["text"] == expected
    assert json.loads(lmi[2])["generated_text"] == expected


def test_penalties_reach_the_engine_on_every_route(serve_toy):
    seen = []

    async def main():
        async with serve_toy() as server:
            submit = server.engine.submit

            def noted(token_ids, sampling, **options):
                seen.append((sampling.presence_penalty, sampling.frequency_penalty))
                return submit(token_ids, sampling, **options)

            server.engine.submit = noted
            wish = {"presence_penalty": 0.5, "frequency_penalty": -1}
            short = wish | {"max_tokens": 1}
            chat = {"messages": [{"role": "user", "content": "a"}]}
            await server.post(COMPLETIONS, {"prompt": "a"} | short)
            await server.post(CHAT, chat | short)
            await server.post("/invocations", {"inputs": "a", "parameters": wish})
            tgi = {"inputs": "a", "parameters": {"frequency_penalty": -1, "max_new_tokens": 1}}
            await server.post("/generate", tgi)

    asyncio.run(main())
    assert seen == [(0.5, -1.0)] * 3 + [(0.0, -1.0)]
