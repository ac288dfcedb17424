"""The follower in C against the one in Python: every time and every gap is the same number."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest

from lmi_bench.analysis.level import queueing
from lmi_bench.analysis.level.layouts import Layout
from lmi_bench.analysis.level.queueing import follow
from lmi_bench.analysis.model.capacity import planned_model_for
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.targets.profiles import find_profile
from tests.analysis.level.test_queueing import plan_of

# full attention, sliding windows in some and in all layers, experts over eight devices; the last
# one is slow to launch, so that the host is what small batches wait for
MODELS = [
    ("llama-2-7b", "ml.g5.2xlarge", 1, "tgi-2023"),
    ("gpt-oss-20b", "ml.g7e.2xlarge", 1, "vllm-0.12"),
    ("mistral-7b-v0.1", "ml.g6e.xlarge", 1, "vllm-0.19"),
    ("mixtral-8x7b", "ml.p4d.24xlarge", 8, "vllm-0.12"),
]
_LAUNCH_S = 8e-4  # of a layer: 26 ms a step, against 5 to 40


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model[0])
def model(request):
    name, instance, degree, profile = request.param
    layout = Layout(find_instance(instance), degree)
    plan = plan_of(name, instance, degree, 100, 100, profile)
    profile = find_profile(profile)
    if request.param is MODELS[-1]:
        slow = replace(profile.parameters, host_per_layer_s=_LAUNCH_S)
        profile = replace(profile, parameters=slow)
    return planned_model_for(layout.setup(plan.workload), profile)


def drawn(seed):
    """A scheduler, a load, lengths and the other arguments, drawn to meet every rule."""
    random = Random(seed)
    size, number = random.choice([1, 2, 10, 16, 64]), random.randint(1, 120)
    longest, most = random.choice([5, 40, 300, 1000]), random.choice([1, 2, 30, 300])
    shared = random.choice([0, 0, longest])
    lengths = [(shared + random.randint(1, longest), random.randint(1, most)) for _ in range(number)]
    if shared or random.random() < 0.5:
        lengths = [(prompt, output, random.randrange(shared, prompt)) for prompt, output in lengths]
    if random.random() < 0.3:
        lengths = lengths[:1] * number
    total = max(sum(each[:2]) for each in lengths)
    blocks = -(-(total + size) // size)  # from one that sends sequences back to one for all
    chunked = random.random() < 0.5
    config = SchedulerConfig(
        num_blocks=blocks + random.choice([0, 1, 3, blocks, 10 * blocks, 1000 * blocks]),
        block_size=size,
        max_model_len=total,
        kv_layout=random.choice(list(KvLayout)),
        max_rolling_batch_size=random.choice([1, 7, 64, 256]),
        chunked_prefill=chunked,
        max_rolling_batch_prefill_tokens=random.choice(
            [16, 64, 512, 4096] if chunked else [1 + total // 2, total, 4096 + total]
        ),
        max_waiting_tokens=0 if chunked else random.choice([0, 1, 3, 20]),
        waiting_served_ratio=random.choice([0, 0.3, 1.2]),
    )
    load = random.randint(1, number)
    if random.random() < 0.7:
        gaps_s = np.random.default_rng(seed).exponential(random.choice([1e-3, 0.1, 10]), number)
        load = list(np.cumsum(gaps_s))
    outside = {"overhead_s": random.choice([0.0, 0.01]), "shared_tokens": shared}
    outside["spacing_s"] = random.choice([0.0, 1e-3, 0.1, 3.0])
    return config, load, lengths, outside | {"slower": random.choice([1.0, 1.05])}


def same(one, other):
    for field in fields(one):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        assert mine.shape == yours.shape
        assert (mine == yours).all(), field.name


@pytest.fixture
def compiled():
    if queueing._native() is None:
        pytest.skip("no C compiler on this machine")


def whole_blocks(seed):
    """`drawn`, where a cache of a few sequences reserves blocks of several tokens for each."""
    config, load, lengths, others = drawn(seed)
    size = Random(seed).choice([2, 10, 16, 64])
    longest = -(-max(sum(each[:2]) for each in lengths) // size)
    reserved = {"kv_layout": KvLayout.CONTIGUOUS, "block_size": size, "num_blocks": 3 * longest}
    return replace(config, **reserved), load, lengths, others


@pytest.mark.parametrize("draw", [drawn, whole_blocks])
@pytest.mark.parametrize("seed", range(60))
def test_both_followers_give_the_same_numbers(compiled, model, draw, seed, monkeypatch):
    config, load, lengths, others = draw(seed)
    slower, price = others.pop("slower"), model.pricer()
    with monkeypatch.context() as without_python:
        without_python.setattr(queueing, "_Copy", None)
        native = follow(model, config, load, lengths, slower=slower, **others)
    same(native, follow(lambda *step: slower * price(*step), config, load, lengths, **others))


def test_sequences_that_the_cache_does_not_hold_are_sent_back(compiled, model):
    """One that was sent back computes its prompt again between two of its tokens."""
    config = SchedulerConfig(num_blocks=45, block_size=16, max_model_len=512)
    few = follow(model, config, 6, [(300, 200)] * 6)
    many = follow(model, replace(config, num_blocks=10**6), 6, [(300, 200)] * 6)
    assert few.gap_s.max() > 3 * many.gap_s.max()
    same(few, follow(model.pricer(), config, 6, [(300, 200)] * 6))


def test_without_a_compiler_python_follows(monkeypatch, model):
    config, load, lengths, others = drawn(3)
    native = follow(model, config, load, lengths, **others)

    def fails(source):
        raise NativeUnavailableError("no C compiler is installed")

    monkeypatch.setattr(queueing, "library", fails)
    queueing._native.cache_clear()
    try:
        assert queueing._native() is None
        same(native, follow(model, config, load, lengths, **others))
    finally:
        queueing._native.cache_clear()


@pytest.mark.parametrize("limits", [{"block_size": 10**6}, {"block_size": 2**62}, {"num_blocks": 2**70}], ids=str)
def test_numbers_that_c_does_not_hold_are_left_to_python(monkeypatch, model, limits):
    """Of a profile that somebody else wrote: no memory for each token of a block, no overflow."""
    monkeypatch.setattr(queueing, "_native", object)  # a library without a function
    config = replace(SchedulerConfig(num_blocks=64, block_size=16, max_model_len=512), **limits)
    lengths = [(300, 100)] * 4
    same(follow(model, config, 2, lengths), follow(model.pricer(), config, 2, lengths))


def test_what_neither_can_follow_is_python_s_error(compiled, model):
    """A prompt that no step takes: C gives up, and Python says why."""
    config = SchedulerConfig(num_blocks=4, block_size=16, max_model_len=64, max_rolling_batch_prefill_tokens=64)
    with pytest.raises(IndexError):
        follow(model, config, [0.0], [(1000, 5)])
    with pytest.raises(IndexError):
        follow(model.pricer(), config, [0.0], [(1000, 5)])


def test_an_interrupt_between_two_prices_frees_the_queue(compiled, model, monkeypatch):
    def interrupted(*step):
        raise KeyboardInterrupt

    freed = []
    native = queueing._native()
    monkeypatch.setattr(model, "pricer", lambda: interrupted)
    monkeypatch.setattr(queueing, "_native", lambda: Spied(native, lambda queue: freed.append(queue)))
    config, _, lengths, _ = drawn(1)
    with pytest.raises(KeyboardInterrupt):
        follow(model, config, 1, lengths)
    assert len(freed) == 1
    assert freed[0]


class Spied:
    """The library, whose `queue_free` is also told to `seen`."""

    def __init__(self, native, seen):
        self._native, self._seen = native, seen

    def __getattr__(self, name):
        return getattr(self._native, name)

    def queue_free(self, queue):
        self._seen(queue)
        self._native.queue_free(queue)


def test_the_load_of_a_plan_is_followed_in_c(compiled, monkeypatch):
    """`CopyPlan.follow` hands over the model itself, not its price as a function."""
    plan = plan_of("llama-3.1-8b", "ml.p5.4xlarge", 1, 100, 50, "vllm-0.19")
    rate_per_s = 0.5 * plan.steady.saturated_rate_per_s
    native = plan.follow(rate_per_s, 200, seed=1)
    monkeypatch.setattr(queueing, "_Copy", None)  # Python's
    same(native, plan.follow(rate_per_s, 200, seed=1))
