"""The trained pair in the box: what random weights cannot show."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from lmi_bench.jobs.bundled import perplexity
from lmi_bench.jobs.settings.bundled import PerplexitySettings
from lmi_bench.models.folder import TRAINED_NAMES, held_out_text, trained_folder
from tests.end_to_end.commands import lmi_bench

TARGET, DRAFT = TRAINED_NAMES
EVERY_BYTE_ALIKE = 257
"""Perplexity of a model that knows nothing: the size of its vocabulary."""


def perplexities(lengths="512", **settings):
    found = perplexity(PerplexitySettings(lengths=lengths, max_tokens=1024, **settings))
    return {
        (scaling, length): score.perplexity for scaling, rows in found.scores.items() for length, score in rows.items()
    }


@pytest.fixture(scope="module")
def plain():
    return perplexities("128,512")


def test_the_pair_is_small_and_its_weights_are_numbers_of_two_bytes():
    total = 0
    for name in TRAINED_NAMES:
        path = trained_folder(name) / "model.safetensors"
        total += path.stat().st_size
        with safe_open(path, "pt") as weights:
            names = list(weights.keys())
            assert {weights.get_slice(each).get_dtype() for each in names} == {"BF16"}
    assert total < 4_000_000
    assert "Python Software Foundation" in (held_out_text(TARGET).parent / "LICENSE-PSF.txt").read_text()


def test_it_has_learnt_what_it_has_not_seen_and_reads_better_with_more_before(plain):
    assert plain[None, 512] < plain[None, 128] < EVERY_BYTE_ALIKE / 20


def test_four_bits_read_a_little_worse(plain):
    whole, rounded = plain[None, 512], perplexities(quantize="awq-int4")[None, 512]
    assert whole < rounded < 1.1 * whole


def test_beyond_the_trained_length_scaling_reads_on_and_costs_within_it():
    """The caution of the posts: positions stretched without training read worse."""
    found = perplexities("512,1024", rope_scaling=("dynamic:2", "linear:2"))
    assert (None, 1024) not in found
    assert found["dynamic:2", 1024] < 1.5 * found[None, 512]
    assert found["linear:2", 512] > 1.05 * found[None, 512]


def test_it_is_the_default_where_text_matters_and_its_drafts_guesses_hold(tmp_path):
    """`generate`, and a recipe without a model, whose prompts are of the text that it knows: more
    than half of the guesses hold, and they change no token."""
    done = lmi_bench("generate", "-p", "The statement ", "--max-new-tokens", "24", "--threads", "1")
    assert "random weights" not in done.stderr
    assert done.stdout.strip().isascii()
    recipe = {
        "engine": {"threads": 1, "num_blocks": 64, "dtype": "float32"},
        "evaluate": {
            "text_tokens": 512,
            "input_tokens": 48,
            "output_tokens": 16,
            "concurrency": [1],
            "rounds": 1,
            "agreement_prompts": 2,
        },
        "variants": [{"name": "draft", "engine": {"draft": DRAFT}}],
    }
    path, out = tmp_path / "recipe.yaml", tmp_path / "job"
    path.write_text(json.dumps(recipe))
    lmi_bench("optimize", path, "--out", out)
    result = json.loads((out / "optimize.json").read_text())
    base, draft, _ = result["variants"]
    assert result["model"] == TARGET
    assert base["quality"]["accepted_frac"] is None
    assert draft["quality"]["accepted_frac"] > 0.5
    assert draft["quality"]["agreement_frac"] == 1.0
    asked = [json.loads(line)["prompt"] for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert {len(text) for text in asked} == {48}
    assert asked[0] == held_out_text(TARGET).read_text()[:48]
