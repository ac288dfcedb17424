"""`lmi-bench optimize` from a recipe to its numbers, its page and its weights."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lmi_bench.core.errors import InputError
from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.executor import ParallelExecutor
from lmi_bench.engine.torch_backend.quantization.export import export_quantized
from lmi_bench.jobs.optimize.run import agreement_frac, optimize, score_shift
from lmi_bench.jobs.settings.bundled import OptimizeSettings
from tests.end_to_end.commands import lmi_bench
from tests.engine.torch_backend.scores import scores


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme is not Scheme.NONE])
def test_saved_weights_are_the_ones_that_were_rounded_at_the_start(trained, tmp_path, scheme):
    """Scales of groups are stored as float16, all else as it is held."""
    settings = QuantizeSettings(scheme, alpha=0.5)
    saved = tmp_path / "saved"
    total = export_quantized(trained, saved, settings, dtype="float32")
    assert total == sum(t.nbytes for t in load_file(saved / "model.safetensors").values())
    wanted = scores(trained, quantize=settings)
    tolerance = 3e-3 if scheme.grouped else 1e-4
    torch.testing.assert_close(scores(saved), wanted, rtol=tolerance, atol=tolerance)
    if scheme in (Scheme.AWQ_INT3, Scheme.SMOOTHQUANT):
        with pytest.raises(InputError, match="nothing to quantize"):
            export_quantized(saved, tmp_path / "again", QuantizeSettings(scheme))


def test_saved_weights_are_split_over_ranks(trained, tmp_path):
    saved = tmp_path / "saved"
    settings = QuantizeSettings(Scheme.SMOOTHQUANT, alpha=0.5, per_token=False)
    export_quantized(trained, saved, settings, dtype="float32")
    together = scores(saved, load=partial(ParallelExecutor.load, tensor_parallel=2))
    torch.testing.assert_close(together, scores(saved), rtol=0.02, atol=0.05)


def test_a_recipe_becomes_a_table_a_page_and_weights_that_serve(trained, tmp_path):
    """Perplexity moves with the bits, what is emulated has no speed, and speculation alone changes
    no token."""
    model = shutil.copytree(trained, tmp_path / "model")
    recipe = {
        "model": str(model),
        "engine": {"dtype": "float32", "threads": 1, "num_blocks": 64},
        "evaluate": {
            "text_tokens": 1500,
            "input_tokens": 24,
            "output_tokens": 12,
            "concurrency": [2],
            "requests_per_user": 2,
            "rounds": 2,
            "agreement_prompts": 3,
            "usd_per_hour": 0.5,
        },
        "variants": [
            {"name": "int8", "engine": {"quantize": "int8"}},
            {"name": "int3", "engine": {"quantize": "awq-int3"}},
            {"name": "fp8", "engine": {"quantize": "fp8"}},
            {"name": "both", "engine": {"quantize": "awq", "draft": "ngram"}, "save": True},
            {"name": "ngram", "engine": {"draft": "ngram"}},
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    out = tmp_path / "job"
    done = lmi_bench("optimize", path, "--out", out)
    results = {each["name"]: each for each in json.loads((out / "optimize.json").read_text())["variants"]}
    assert list(results) == ["baseline", "int8", "int3", "fp8", "both", "ngram", "baseline-again"]
    assert results["baseline-again"]["engine"] == results["baseline"]["engine"]
    again = results["baseline-again"]["throughput_ratios"]["concurrency 2"]
    assert again[1] <= again[0] <= again[2]

    quality = {name: each["quality"] for name, each in results.items()}
    base = quality["baseline"]["perplexity"]
    assert quality["int8"]["perplexity"] == pytest.approx(base, rel=5e-3)
    assert quality["both"]["perplexity"] == pytest.approx(base, rel=0.02)
    assert quality["int3"]["perplexity"] > max(base, quality["both"]["perplexity"])
    shifts = [quality[name]["logprob_shift"] for name in ("baseline", "int8", "both", "int3")]
    assert shifts == sorted(shifts)
    assert shifts[0] == 0
    assert quality["ngram"]["agreement_frac"] == 1.0
    assert quality["ngram"]["logprob_shift"] == pytest.approx(0, abs=1e-6)
    assert quality["int3"]["mean_output_error"] > quality["int8"]["mean_output_error"] > 0

    sizes = {name: each["memory"]["weight_bytes"] for name, each in results.items()}
    assert sizes["int3"] < sizes["both"] < sizes["int8"] < sizes["baseline"] == sizes["ngram"]
    saved = sizes["baseline"] - sizes["int8"]
    gained = results["int8"]["memory"]["kv_tokens_in_baseline_memory"]
    token_bytes = 2 * 2 * 128 * 4  # keys and values, two layers, 128 features, float32
    assert gained == 64 * 64 + saved // token_bytes

    assert results["fp8"]["emulated"]
    assert results["fp8"]["levels"] == []
    assert results["fp8"]["usd_per_1m_output"] is None
    speed = results["int8"]["levels"][0]["throughput_tokens_per_s"]
    assert results["int8"]["usd_per_1m_output"] == pytest.approx(0.5e6 / 3600 / speed)
    middle, low, high = results["int8"]["throughput_ratios"]["concurrency 2"]
    assert low <= middle <= high

    page = (out / "report.html").read_text()
    assert "Variants side by side" in page
    assert "emulated" in page
    assert "Variants side by side" in done.stdout
    again = lmi_bench("generate", "-m", out / "both-model", "-p", "The ", "--max-new-tokens", "4")
    assert "4 tokens in 1 request" in again.stderr
    config = json.loads((out / "both-model" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == ("awq", 4, 128)


def test_what_is_only_emulated_is_not_swept(trained):
    done = lmi_bench("sweep", "--target", "engine", "--model", trained, "--quantize", "fp8", expect=2)
    assert "only emulated" in done.stderr


def test_agreement_counts_tokens_before_the_first_that_differs():
    """By hand: 4 of 4 and 1 of 4, although later tokens are the same again."""
    mine = [(1, 2, 3, 4), (1, 9, 3, 4)]
    assert agreement_frac(mine, [(1, 2, 3, 4), (1, 2, 3, 4)]) == pytest.approx((1 + 0.25) / 2)
    assert score_shift([-1.0, -2.0], [-1.5, -1.5]) == pytest.approx(0.5)


def test_a_place_where_no_folder_can_be_made_is_one_line(tmp_path):
    """Before a model is loaded."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: demo-15m\nvariants: [{name: a, engine: {quantize: int8}}]\n")
    out = recipe / "out"
    with pytest.raises(InputError, match="cannot be created: Not a directory; name another folder"):
        optimize(OptimizeSettings(recipe=recipe, out=out))
