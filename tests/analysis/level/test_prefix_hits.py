"""Prefix caches in simulation: hit rates against a replay written here, and what they change."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from dataclasses import replace

import pytest

from lmi_bench.analysis.fit.forecast import hit_share
from lmi_bench.analysis.level.prefix_hits import PrefixTraffic
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.core.load import Load
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.traces import read_trace
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.router import PrefixAffine, RandomChoice
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.loadgen.prompts.prompts import TracePrompts, distinct_ids
from lmi_bench.targets.prompts import PlannedPrompts

BLOCK = 16


class Quick:
    """1 ms and 10 us for each computed prompt token."""

    def step_time_s(self, shape):
        return 1e-3 + 1e-5 * shape.prefill_tokens


def conversations(requests, block, *, seed):
    """Rows of a trace: conversations that grow by turns, behind a system prompt that all share."""
    draw, chats, rows, fresh = random.Random(seed), [], [], iter(range(10**9))
    system = [next(fresh) for _ in range(1024 // block)]
    for number in range(requests):
        if chats and draw.random() < 0.75:
            chat = chats.pop(draw.randrange(max(0, len(chats) - 40), len(chats)))
        else:
            chat = {"tokens": 1024, "ids": list(system)}
        length = chat["tokens"] + draw.randrange(100, 900)
        ids = chat["ids"][: chat["tokens"] // block]
        ids += [next(fresh) for _ in range(-(-length // block) - len(ids))]
        output = draw.randrange(20, 200)
        rows.append((number, length, output, ids))
        if length < 12_000:
            chats.append({"tokens": length, "ids": ids})
    return rows


def mooncake(rows, path):
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [dict(zip(keys, (1000 * at, *rest), strict=True)) for at, *rest in rows]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def bailian(rows, path):
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    more = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}
    lines = [dict(zip(keys, row, strict=True)) | more for row in rows]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def replayed(rows, block, capacity, on_host=0):
    """Hit rate of an LRU cache of `capacity` engine blocks, over the hash ids alone, and the part
    of it that a second one of `on_host` blocks has, which gets what falls out of the first.

    The last token of a prompt is always computed; answers fill blocks that nobody asks for again.
    """
    cache, names, fresh = OrderedDict(), {}, iter(range(-1, -(10**9), -1))
    host = OrderedDict()
    hit = away = tokens = 0
    for _, length, output, ids in rows:
        chain, before = [], None
        for place in range(length // BLOCK):
            content = ids[place * BLOCK // block], place * BLOCK % block
            before = names.setdefault((before, content), len(names))
            chain.append(before)
        found = 0
        while found < min(len(chain), (length - 1) // BLOCK):
            if chain[found] not in cache and chain[found] not in host:
                break
            away += BLOCK * (chain[found] in host)
            found += 1
        hit, tokens = hit + found * BLOCK, tokens + length
        chain += [next(fresh) for _ in range((length + output - 1) // BLOCK - len(chain))]
        for key in reversed(chain):
            host.pop(key, None)
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            host[cache.popitem(last=False)[0]] = None
        while len(host) > on_host:
            host.popitem(last=False)
    return hit / tokens, away / tokens


def simulated(path, rows, config, step_time):
    """The rows of a trace file in the simulator."""
    trace = read_trace(path)
    assert trace.rate_per_s == pytest.approx(1.0)
    prompts = TracePrompts(trace, distinct_ids, seed=0)
    spec = LevelSpec(0, Load(rate_per_s=1.0, arrivals="trace"), num_requests=len(rows))
    return simulate_level(spec, lambda n: prompts.request(spec, n), config, step_time)


@pytest.mark.parametrize(("capacity", "on_host"), [(1_500, 0), (4_000, 0), (1_500, 3_000)])
@pytest.mark.parametrize(("write", "block"), [(mooncake, 512), (bailian, 16)])
def test_the_simulated_hit_rate_is_that_of_an_independent_lru_replay(tmp_path, write, block, capacity, on_host):
    rows, path = conversations(150, block, seed=block), tmp_path / "trace.jsonl"
    write(rows, path)
    assert read_trace(path).block_tokens == block
    config = SchedulerConfig(num_blocks=capacity, max_model_len=20_000, prefix_caching=True, host_blocks=on_host)
    run = simulated(path, rows, config, Quick())
    hit, away = replayed(rows, block, capacity, on_host)
    assert hit_share(run.records).value == pytest.approx(hit, abs=0.01)
    done = run.engine
    assert done["prefix_hit_tokens"] == sum(r.exchange.cached_tokens for r in run.records)
    copied = done.get("host_hit_tokens", 0) / done["prefix_tokens"]
    assert copied == pytest.approx(away, abs=0.01)
    assert (away > 0.1) == bool(on_host)


@pytest.mark.parametrize(("write", "block"), [(mooncake, 512), (bailian, 16)])
def test_a_host_with_room_for_all_gives_the_hits_of_a_cache_without_bound(tmp_path, write, block):
    rows, path = conversations(150, block, seed=block), tmp_path / "trace.jsonl"
    write(rows, path)
    small = SchedulerConfig(num_blocks=1_500, max_model_len=20_000, prefix_caching=True)
    small, hosted, boundless = (
        hit_share(simulated(path, rows, config, Quick()).records).value
        for config in (small, replace(small, host_blocks=10**6), replace(small, num_blocks=10**6))
    )
    assert small < hosted - 0.1
    assert hosted == pytest.approx(boundless, abs=1e-12)
    assert hosted == pytest.approx(replayed(rows, block, 10**6)[0], abs=0.01)


def planned(workload, rate_per_s, requests):
    request = PlannedPrompts(parse_scenario({"workload": workload})).at(rate_per_s)
    return [request(number) for number in range(requests)]


def test_a_conversation_repeats_its_questions_and_answers():
    """Turn k has k questions of 100 tokens and k - 1 answers of 50, which are the simulator's."""
    asked = planned({"turns": 3, "input_tokens": 100, "output_tokens": 50}, 0.001, 3)
    assert [each.input_tokens for each in asked] == [100, 250, 400]
    first, second, _ = (list(each.prompt_token_ids) for each in asked)
    assert second[:100] == first
    assert second[100:150] == [0] * 50
    assert len({*second[150:], *first}) == 200
    assert asked[1].arrival_s - asked[0].arrival_s == pytest.approx(50 * PlannedPrompts.ANSWER_S)


def test_many_conversations_come_in_order_at_the_stated_rate():
    asked = planned({"turns": "uniform(1,5)", "think_s": "exponential(30)"}, 4.0, 1600)
    times = [each.arrival_s for each in asked]
    assert times == sorted(times)
    assert 800 / (times[-1] - times[799]) == pytest.approx(4.0, rel=0.1)


def test_documents_repeat_by_their_popularity():
    """Of 4 documents the first is in 1 of 1 + 1/2 + 1/3 + 1/4 prompts: 48 %."""
    workload = {"documents": "4x64", "shared_prefix": 32, "input_tokens": 100}
    asked = planned(workload, 1.0, 2000)
    assert len({tuple(each.prompt_token_ids[:32]) for each in asked}) == 1
    texts = [tuple(each.prompt_token_ids[32:96]) for each in asked]
    shares = sorted((texts.count(text) / 2000 for text in set(texts)), reverse=True)
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)
    assert len({tuple(each.prompt_token_ids[96:]) for each in asked}) == 2000


def test_a_prefix_affine_router_keeps_conversations_where_their_cache_is():
    """Four copies: at random a turn meets its history on one of four."""
    workload = {"turns": 8, "input_tokens": 160, "output_tokens": 96, "think_s": 5}
    request = PlannedPrompts(parse_scenario({"workload": workload})).at(8.0)
    spec = LevelSpec(0, Load(rate_per_s=8.0, arrivals="trace"), num_requests=300)
    config = SchedulerConfig(num_blocks=20_000, prefix_caching=True)

    def hits(router):
        run = simulate_level(spec, request, config, Quick(), replicas=4, router=router)
        return hit_share(run.records).value

    at_random = hits(RandomChoice(iter(random.Random(1).random, None)))
    affine = hits(PrefixAffine())
    alone = hit_share(simulate_level(spec, request, config, Quick()).records).value
    assert affine > alone - 0.05
    assert at_random < 0.6 * alone


def test_a_prefix_affine_router_spreads_what_all_prompts_share():
    router, system = PrefixAffine(), list(range(256))
    outstanding = [0, 0, 0]
    for number in range(60):
        outstanding[router.pick(outstanding, [*system, *[1000 + number] * 64])] += 1
    assert max(outstanding) - min(outstanding) <= 1.5 * min(outstanding) + 5


def traffic(workload, **more):
    return PrefixTraffic(PlannedPrompts(parse_scenario({"workload": workload})).at, **more)


CHAT = {"turns": 6, "input_tokens": 160, "output_tokens": 96, "shared_prefix": 320, "think_s": 5}


@pytest.mark.parametrize("blocks", [400, 1500])
def test_the_planned_hits_are_those_of_the_engines_cache(blocks):
    """On the same requests, after those that warm the cache; the plan's blocks are coarser."""
    chats = traffic(CHAT)
    spec = LevelSpec(0, Load(rate_per_s=2.0, arrivals="trace"), num_requests=700)
    config = SchedulerConfig(num_blocks=blocks, prefix_caching=True)
    run = simulate_level(spec, chats.of_copy(2.0, 1, seed=0), config, Quick())
    simulated = hit_share(run.records[200:]).value
    found = chats.lengths(2.0, 1, config.cache_tokens)
    planned_share = sum(cached for _, _, cached in found) / sum(prompt for prompt, _, _ in found)
    assert planned_share == pytest.approx(simulated, abs=0.06)


def test_what_every_prompt_shares_is_held_once():
    """Neighbours share the system prompt of 320 tokens, seldom a conversation."""
    assert traffic(CHAT).shared_tokens(2.0, 1) == pytest.approx(320, abs=80)


def test_at_random_a_turn_finds_its_history_on_one_copy_of_four():
    """With a router that knows prompts on all; the shared prompt is on every copy."""
    blind, keeping = traffic(CHAT), traffic(CHAT, keeps=True)

    def share(each, copies):
        found = each.lengths(1.0, copies, 1e6)
        return sum(cached for _, _, cached in found) / sum(prompt for prompt, _, _ in found)

    alone, at_random = share(blind, 1), share(blind, 4)
    assert share(keeping, 4) == pytest.approx(alone, abs=0.02)
    assert 320 / 960 < at_random < alone - 0.1
