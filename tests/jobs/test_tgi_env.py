"""TGI's environment names set the limits of `serve`, and the limits refuse what exceeds them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.jobs.serving_file import limits_from_environment
from lmi_bench.targets.simulated import open_simulated_engine


def test_every_name_sets_its_limit():
    found = limits_from_environment(
        {
            "MAX_CONCURRENT_REQUESTS": "128",
            "MAX_TOTAL_TOKENS": "4096",
            "MAX_INPUT_LENGTH": "4095",
            "MAX_BATCH_PREFILL_TOKENS": "8192",
            "MAX_BATCH_TOTAL_TOKENS": "16000",
            "HOME": "/root",
        }
    )
    assert {setting: value for setting, (_, value) in found.items()} == {
        "max_concurrent_requests": 128,
        "max_model_len": 4096,
        "max_input_tokens": 4095,
        "max_rolling_batch_prefill_tokens": 8192,
        "max_batch_total_tokens": 16000,
    }


def test_both_names_of_the_longest_input_are_taken_but_not_together():
    assert limits_from_environment({"MAX_INPUT_TOKENS": "9"}) == {"max_input_tokens": ("MAX_INPUT_TOKENS", 9)}
    with pytest.raises(InputError, match="MAX_INPUT_TOKENS and MAX_INPUT_LENGTH are both set"):
        limits_from_environment({"MAX_INPUT_TOKENS": "9", "MAX_INPUT_LENGTH": "9"})


@pytest.mark.parametrize("text", ["0", "-4", "many", "1.5"])
def test_what_is_no_number_of_tokens_is_refused_with_its_name(text):
    with pytest.raises(InputError, match=f"MAX_TOTAL_TOKENS={text} in the environment"):
        limits_from_environment({"MAX_TOTAL_TOKENS": text})


def test_an_empty_variable_is_absent():
    assert limits_from_environment({"MAX_TOTAL_TOKENS": " "}) == {}


def test_a_prompt_beyond_the_longest_input_is_refused_although_the_whole_would_fit():
    scheduler = Scheduler(SchedulerConfig(num_blocks=99, max_model_len=100, max_input_tokens=50))
    scheduler.add(0, range(50), SamplingParams(max_new_tokens=50), 0.0)
    with pytest.raises(CapacityError, match="has 51 input tokens but the engine accepts at most 50"):
        scheduler.add(1, range(51), SamplingParams(max_new_tokens=1), 0.0)


def test_a_longest_input_that_leaves_no_room_for_output_is_refused():
    with pytest.raises(InputError, match="from 1 to 99"):
        SchedulerConfig(num_blocks=99, max_model_len=100, max_input_tokens=100)


def simulated(**settings):
    return open_simulated_engine("llama-2-7b", "ml.g5.2xlarge", EngineSection(**settings), max_total_tokens=512)


def test_the_token_budget_of_a_batch_bounds_the_cache():
    """1,000 tokens are 62 whole blocks of 16."""
    config = simulated(max_batch_total_tokens=1000).config
    assert (config.block_size, config.num_blocks) == (16, 62)


def test_a_budget_above_the_cache_is_refused_with_both_numbers():
    whole = simulated().config.cache_tokens
    with pytest.raises(CapacityError, match=rf"{whole + 16:,}: the KV cache holds {whole:,}"):
        simulated(max_batch_total_tokens=whole + 16)


def test_a_server_keeps_the_limits_of_its_environment():
    """One request at a time, 40 tokens at most, 30 of them in the prompt."""
    limits = {"MAX_CONCURRENT_REQUESTS": "1", "MAX_TOTAL_TOKENS": "40", "MAX_INPUT_LENGTH": "30"}
    with serving(limits) as (ask, notes):

        def generate(num_words, max_new_tokens):
            body = {"inputs": words(num_words), "parameters": {"max_new_tokens": max_new_tokens}}
            return ask("/invocations", body)

        assert generate(10, 5)[0] == 200
        status, text = generate(31, 2)
        assert (status, "must have less than 30 tokens. Given: 31" in text) == (422, True)
        status, text = generate(20, 21)
        assert (status, "must be <= 40. Given: 20 `inputs` tokens" in text) == (422, True)
    assert "MAX_INPUT_LENGTH=30 from the environment" in notes[0]


def test_a_chat_without_a_length_asks_for_no_more_than_the_cache_holds():
    """Two blocks of 16 tokens for requests of up to 40: the answer ends with the cache."""
    limits = {"MAX_TOTAL_TOKENS": "40", "MAX_BATCH_TOTAL_TOKENS": "32"}
    with serving(limits) as (ask, _):
        chat = {"messages": [{"role": "user", "content": words(12)}]}
        status, text = ask("/v1/chat/completions", chat)
    assert status == 200, text
    assert json.loads(text)["usage"]["total_tokens"] == 32


def words(count):
    return " ".join(["word"] * count)


@contextmanager
def serving(limits):
    """(post a body to a path, what the server said on its way out)."""
    serve = [sys.executable, "-m", "lmi_bench", "serve", "--port", "0"]
    serve += ["--executor", "simulated", "--model", "llama-2-7b", "--instance", "ml.g5.2xlarge"]
    notes = []
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | limits
    ) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline()).group()

            def ask(path, body):
                request = urllib.request.Request(url + path, json.dumps(body).encode())
                try:
                    with urllib.request.urlopen(request, timeout=60) as reply:
                        return reply.status, reply.read().decode()
                except urllib.error.HTTPError as exc:
                    with exc:
                        return exc.code, exc.read().decode()

            yield ask, notes
        finally:
            server.terminate()
            notes.append(server.communicate(timeout=120)[1])
