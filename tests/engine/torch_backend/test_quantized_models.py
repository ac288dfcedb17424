"""Whole models with rounded weights: calibrated, split over ranks, stored, drafted."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import partial
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.executor import ParallelExecutor, TorchExecutor
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.calibration import Calibration, prepare, scale_groups
from lmi_bench.engine.torch_backend.quantization.loader import (
    COLUMN_FACTORS,
    OUTPUT_DIVISORS,
    QuantizePlan,
    build_model,
)
from lmi_bench.engine.torch_backend.quantization.rounding import round_grouped, to_awq
from lmi_bench.engine.torch_backend.runner import ModelRunner, TorchForward
from lmi_bench.engine.torch_backend.weights import read_model
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config
from tests.engine.torch_backend.parity import generate, random_requests
from tests.engine.torch_backend.scores import TOKENS, scores
from tests.engine.torch_backend.trained_model import perplexity, text_scores

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spec_of(folder):
    return spec_from_hf_config(folder.name, read_config(folder))


def plan_for(folder, settings, degree=1):
    return prepare(Calibration(read_model(folder), settings, "float32", CPU), degree=degree)


def split(degree):
    return partial(ParallelExecutor.load, tensor_parallel=degree)


def test_fewer_bits_move_more_and_calibration_wins_some_back(trained):
    """Log-probabilities of a model that has learnt something, with outliers in its channels: by
    how much they move on average, and what that does to the perplexity."""
    exact = text_scores(trained)

    def moved(scheme, plan=None):
        settings = QuantizeSettings(scheme, alpha=0.5)
        scores = text_scores(trained, plan or plan_for(trained, settings))
        return float((scores - exact).abs().mean()), perplexity(scores) / perplexity(exact)

    measured = {scheme: moved(scheme) for scheme in Scheme if scheme is not Scheme.NONE}
    shifts = [measured[s][0] for s in (Scheme.INT8, Scheme.AWQ_INT4, Scheme.AWQ_INT3)]
    assert 0 < shifts[0] < shifts[1] < shifts[2]
    assert measured[Scheme.INT8][1] == pytest.approx(1, abs=3e-3)
    assert measured[Scheme.AWQ_INT3][1] > 1.001
    for scheme, share in ((Scheme.AWQ_INT4, 0.7), (Scheme.AWQ_INT3, 1.0), (Scheme.SMOOTHQUANT, 0.6)):
        size = 128 if scheme.grouped else 0
        plain, _ = moved(scheme, QuantizePlan(QuantizeSettings(scheme), size))
        assert measured[scheme][0] < share * plain, scheme


@pytest.mark.parametrize("step", ["per_token", "per_channel"])
def test_coarser_scales_of_smoothquant_cost_something(trained, step):
    fine = QuantizeSettings(Scheme.SMOOTHQUANT, alpha=0.5)
    coarse = QuantizeSettings(Scheme.SMOOTHQUANT, alpha=0.5, **{step: False})
    exact = text_scores(trained)
    shifts = [float((text_scores(trained, plan_for(trained, each)) - exact).abs().mean()) for each in (fine, coarse)]
    assert 0 < shifts[0] < shifts[1] < 0.2


FAMILIES = {
    "MHA": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "GQA": ("Qwen3", {}),
    "experts": ("Mixtral", {}),
    "parallel": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "one norm": ("Falcon", {"multi_query": True}),
    "sequential": ("Falcon", {"parallel_attn": False, "bias": True}),
}


@pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES)
def test_moved_scales_leave_the_model_as_it_is(make_model, tmp_path, family, changes):
    """Any factors at all, without rounding."""
    folder = make_model(family, **changes).folder
    factors = {}
    generator = torch.Generator().manual_seed(0)
    stored = load_file(folder / "model.safetensors")
    for producer, readers in scale_groups(spec_of(folder)):
        columns = stored[f"{readers[0]}.weight"].shape[1]
        found = torch.rand(columns, generator=generator) + 0.5
        factors[f"{producer}.{OUTPUT_DIVISORS}"] = found
        factors |= {f"{name}.{COLUMN_FACTORS}": found.clone() for name in readers}
    assert len(factors) > 4
    path = tmp_path / "factors.safetensors"
    save_file(factors, path)
    plan = QuantizePlan(QuantizeSettings(Scheme.NONE), factors=path)
    logits = [logits_of(built(folder, each)) for each in (None, plan)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


def built(folder, plan):
    precision = Precision(torch.float32, torch.float32)
    return build_model(folder, spec_of(folder), precision, CPU, plan=plan)


def logits_of(model):
    shape = model.shape
    layout = KvLayoutShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, 64, torch.float32)
    runner = ModelRunner(TorchForward(model, KvCache(layout, 2, CPU)), sampling_seed=0)
    return torch.tensor(runner.score(TOKENS, 1))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mixtral", "Falcon"])
@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.AWQ_INT4])
def test_every_family_is_rounded(make_model, family, scheme, tokenizer_json):
    """8 bits stay near the floats, 4 bits are off by more but by no more than rounding allows."""
    folder = make_model(family).folder
    tokenizer_json(folder)
    exact, rounded = scores(folder), scores(folder, quantize=QuantizeSettings(scheme))
    error = (rounded - exact).abs().mean()
    assert 0 < error < (0.2 if scheme is Scheme.INT8 else 2.0)


@pytest.fixture
def tokenizer_json(trained):
    """Gives a model of random weights the tokenizer of the trained one: its ids are all known."""
    return lambda folder: shutil.copy(trained / "tokenizer.json", folder)


@pytest.mark.parametrize("scheme", [s for s in Scheme if s is not Scheme.NONE])
def test_ranks_together_hold_what_one_device_holds(trained, scheme):
    """Groups end where ranks meet, so 3 and 4 bits are the same numbers; scales of a row and of
    activations are each rank's own and only finer."""
    settings = QuantizeSettings(scheme, alpha=0.5)
    if scheme.grouped:  # the groups that two ranks allow, for one device as well
        assert plan_for(trained, settings, degree=2).group_size == 64
    alone, together = (scores(trained, quantize=settings), scores(trained, load=split(2), quantize=settings))
    tolerance = 0.3 if scheme is Scheme.AWQ_INT3 else 0.15
    assert (alone - together).abs().mean() < tolerance


def test_an_awq_checkpoint_of_others_is_read_on_one_device_and_on_ranks(trained, tmp_path):
    """Matrices packed in the public format give what the floats that they stand for give."""
    folder, packed = as_awq(trained, tmp_path, 64)
    wanted = scores(folder)
    torch.testing.assert_close(scores(packed), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores(packed, load=split(2)), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="quantized as awq-int4"):
        scores(packed, quantize=QuantizeSettings(Scheme.INT8))
    with pytest.raises(CapacityError, match=r"groups of 64 weights.*lower --tp"):
        scores(packed, load=split(4))


@pytest.mark.parametrize("group_size", [16, -1])
def test_an_awq_checkpoint_with_one_kv_head_is_shared_by_ranks(make_llama, tmp_path, group_size):
    """Each rank has the whole of the packed key and value; -1 is one scale for a whole row."""
    folder, packed = as_awq(make_llama(num_key_value_heads=1).folder, tmp_path, group_size)
    torch.testing.assert_close(scores(packed, load=split(2)), scores(folder), rtol=1e-4, atol=1e-4)


def test_an_awq_checkpoint_of_fused_matrices_is_read(make_model, tmp_path):
    folder, packed = as_awq(make_model("Phi3").folder, tmp_path, 16)
    torch.testing.assert_close(scores(packed), scores(folder), rtol=1e-4, atol=1e-4)


def as_awq(source, tmp_path, group_size):
    """(a folder of rounded floats, the same numbers packed in the public format)"""
    folder = shutil.copytree(source, tmp_path / "floats")
    packed = shutil.copytree(source, tmp_path / "packed")
    tensors = load_file(source / "model.safetensors")
    floats, stored = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            size = tensor.shape[1] if group_size < 0 else group_size
            rounded = round_grouped(tensor.float(), 4, size)
            public = to_awq(rounded)
            halved = public["scales"].t().float()
            floats[name] = (
                (rounded.values.view(*halved.shape, -1) - rounded.zeros[..., None].float()) * halved[..., None]
            ).view(tensor.shape)
            del stored[name]
            stored |= {name.replace("weight", kind): part for kind, part in public.items()}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    change_config(
        packed,
        quantization_config={
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
        },
    )
    return folder, packed


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq' cannot be loaded; supported: awq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "awq", "version": None, "format": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "8 bits"),
        ({"quant_method": "awq", "group_size": None}, "group_size None is no whole number"),
        ({"quant_method": "awq", "group_size": "x"}, "group_size 'x' is no whole number"),
        ("awq", "quantization_config 'awq' is no object"),
    ],
)
def test_what_is_quantized_in_another_way_is_named(llama, tmp_path, stated, words):
    folder = shutil.copytree(llama.folder, tmp_path / "model")
    change_config(folder, quantization_config=stated)
    with pytest.raises(InputError, match=words):
        scores(folder)


def test_factors_are_found_once_and_anew_when_the_weights_change(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "model")
    told = []
    find = partial(
        Calibration,
        read_model(folder),
        QuantizeSettings(Scheme.SMOOTHQUANT),
        "float32",
        CPU,
        lambda *args: told.append(args),
    )
    first = find().factors(0)
    assert told
    told.clear()
    assert find().factors(0) == first
    assert not told, "the second start reads the file"
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "extra": torch.zeros(1)}, folder / "model.safetensors")
    assert find().factors(0) != first


def test_memory_that_weights_leave_holds_more_blocks(trained):
    """The same memory for weights and cache: what 4 bits save becomes cache."""
    sizes = {}
    for scheme in (Scheme.NONE, Scheme.INT8, Scheme.AWQ_INT4, Scheme.AWQ_INT3):
        executor = TorchExecutor.load(
            trained, LoadSettings(dtype="float32", num_blocks=1, threads=1, quantize=QuantizeSettings(scheme))
        )
        sizes[scheme] = executor.weight_bytes
        asyncio.run(executor.close())
    assert all(more > less for more, less in pairwise(sizes.values()))
    matrices = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    saved = sizes[Scheme.NONE] - sizes[Scheme.AWQ_INT4]
    assert saved == matrices * 4 - (matrices // 2 + matrices // 128 * 3)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.AWQ_INT4, Scheme.SMOOTHQUANT])
def test_a_rolling_batch_gives_each_request_its_tokens(trained, scheme):
    """Together and one after the other, chunked and preempted: the same greedy tokens."""
    quantize = QuantizeSettings(scheme)
    requests = [
        ([token % 70 for token in prompt], count, 0.0)
        for prompt, count, _ in random_requests(4, 5, longest_prompt=20, longest_output=12)
    ]
    together, _ = asyncio.run(
        generate(trained, requests, quantize=quantize, num_blocks=20, block_size=4, chunked_prefill=True)
    )
    alone = [asyncio.run(generate(trained, [r], quantize=quantize))[0][0] for r in requests]
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    assert same >= len(requests) - 1  # a near tie may fall either way
