"""Prompts of recorded traffic against a reader of its own: equal hash ids are equal text."""

from __future__ import annotations

import json
import random
import re
from itertools import combinations

import pytest

from lmi_bench.core.load import Load
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.prompts.agents import AgentSessions
from lmi_bench.loadgen.prompts.prompts import ExactText, TokenIds, common_words, distinct_ids
from lmi_bench.targets.prompts import make_prompts

BLOCKS = {"mooncake": 512, "bailian": 16, "bailian sessions": 16, "weka local": 64, "weka global": 64}
REQUESTS, PLAYS = 16, 2
WORDS = [f"{a}{b}{c}d" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvw"]
PIECES = ["<s>", *"abcdefghijklmnopqrstuvw", *(f" {each}" for each in WORDS), *WORDS]
IDS = {piece: place for place, piece in enumerate(PIECES)}


class Pieces:
    """Words and endings of four letters, and a token before every text; endings that are put
    together are split into letters, as byte pairs are that no merge knows."""

    vocab_size = len(PIECES)

    def encode(self, text):
        found = [0]
        for word in re.findall(r" ?\w+", text):
            parts = re.findall(r" ?\w{4}", word)
            same = len({each.strip() for each in parts}) == 1 and "".join(parts) == word
            found += map(IDS.get, parts if same else word.strip())
        return found

    def decode(self, ids):
        return "".join(PIECES[each] for each in ids)


def recorded(kind, seed, path):
    """Random requests that begin like earlier ones, as (scope of its ids, input tokens, ids); an
    output length of its own tells each from the others."""
    draw, size, rows, lines = random.Random(seed), BLOCKS[kind], {}, []
    for number in range(REQUESTS):
        ids = list(draw.choice(list(rows.values()))[2]) if rows else []
        ids = ids[: draw.randrange(len(ids) + 1)] + draw.sample(range(40), draw.randrange(1, 4))
        length = max(2, size * len(ids) - draw.choice((0, size - 1, draw.randrange(size))))
        ids = ids[: draw.choice((len(ids), length // size))]  # the last, shorter block may have none
        rows[number + 1] = number % 3 if kind == "weka local" else 0, length, ids
        row = {"timestamp": number, "input_length": length, "output_length": number + 1, "hash_ids": ids}
        lines.append(row | ({"chat_id": number, "parent_chat_id": -1} if "bailian" in kind else {}))
    if "weka" in kind:
        names = {"timestamp": "t", "input_length": "in", "output_length": "out", "hash_ids": "hash_ids"}
        calls = [{"type": "s", **{names[key]: value for key, value in line.items()}} for line in lines]
        calls[9:] = [{"t": each["t"], "type": "subagent", "requests": [each]} for each in calls[9:]]
        scope = {"block_size": size, "hash_id_scope": kind.split()[1]}
        lines = [{**scope, "requests": calls[first::3]} for first in range(3)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return rows


def sent(prompts):
    """The tokens of each request by play and output length."""
    found = {}
    spec = LevelSpec(1, Load(1), num_requests=1)
    for number in range(PLAYS * (prompts.recorded.number if isinstance(prompts, AgentSessions) else REQUESTS)):
        if isinstance(prompts, AgentSessions):
            play = number // prompts.recorded.number
            requests = [each.request for each, _ in prompts.begin(spec, number, 0).waiting.values()]
        else:
            play, requests = number // REQUESTS, [prompts.request(spec, number)]
        for each in requests:
            tokens = each.prompt_token_ids or each.prompt_text.split()
            found[play, each.output_tokens] = tuple(tokens)
    return found


@pytest.mark.parametrize("text", [TokenIds(50_000), distinct_ids, common_words, ExactText(Pieces())])
@pytest.mark.parametrize("kind", BLOCKS)
def test_prompts_share_blocks_byte_for_byte_as_the_hashes_say(tmp_path, kind, text):
    """Blocks of two prompts are equal where their ids are, and nowhere else, in no other play."""
    size, least = BLOCKS[kind], 1 if text is distinct_ids else 2  # one drawn token may be equal by chance
    key = "trace" if kind in ("mooncake", "bailian") else "agent_trace"
    for seed in range(2):
        path = tmp_path / f"{seed}.jsonl"
        rows = recorded(kind, seed, path)
        asked = sent(make_prompts(parse_scenario({"workload": {key: str(path)}, "seed": seed}), text, None, "salt"))
        assert {place: len(tokens) for place, tokens in asked.items()} == {
            (play, each): length for play in range(PLAYS) for each, (_, length, _) in rows.items()
        }
        for (play, a), (other, b) in combinations(asked, 2):
            (scope, first, ids), (its_scope, second, its_ids) = rows[a], rows[b]
            for place in range(0, min(first, second), size):
                end, block = min(place + size, first, second), place // size
                one, two = (each[place:end] for each in (asked[play, a], asked[other, b]))
                alike = (play, scope, ids[block : block + 1]) == (other, its_scope, its_ids[block : block + 1])
                if alike and ids[block:]:
                    assert one == two
                elif end - place >= least:
                    assert one != two
