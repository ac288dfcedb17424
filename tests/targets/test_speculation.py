"""What `--draft` accepts and refuses, and what a run says of it."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.scheduling.adaptive_drafting import AdaptiveDrafter
from lmi_bench.engine.scheduling.drafting import NgramDrafter
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.drafting import check_same_vocabulary, drafter_for
from lmi_bench.targets.simulated import open_simulated_engine
from tests.end_to_end.commands import lmi_bench


def folder_with(path, vocabulary):
    path.mkdir()
    FastTokenizer(WordLevel(vocabulary, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


def test_a_draft_with_another_vocabulary_is_refused(tmp_path):
    model = folder_with(tmp_path / "model", {"a": 0, "b": 1})
    check_same_vocabulary(model, folder_with(tmp_path / "same", {"b": 1, "a": 0}))
    for name, vocabulary in (("swapped", {"a": 1, "b": 0}), ("larger", {"a": 0, "b": 1, "c": 2})):
        with pytest.raises(InputError, match=f"draft {name} .* has another vocabulary than model"):
            check_same_vocabulary(model, folder_with(tmp_path / name, vocabulary))


def simulated(**settings):
    return open_simulated_engine("llama-2-7b", "ml.g5.2xlarge", EngineSection(**settings), max_total_tokens=512)


def test_a_simulated_engine_has_to_be_told_how_many_drafts_hold():
    with pytest.raises(InputError, match="give --draft-acceptance, from 0 to 1"):
        simulated(draft="ngram")


def test_a_simulated_draft_of_another_family_is_refused():
    with pytest.raises(InputError, match="has 128,256 token ids, llama-2-7b 32,000"):
        simulated(draft="llama-3.2-1b", draft_acceptance=0.5)


def test_the_bundled_engine_finds_that_out_itself():
    with pytest.raises(InputError, match="is for a simulated engine"):
        open_torch_engine("demo-15m", EngineSection(draft="ngram", draft_acceptance=0.5))


def test_a_draft_of_a_simulated_engine_takes_its_own_steps(tmp_path):
    """Perfect drafts of 3 tokens save three steps in four; a draft model's own steps cost time
    that look-up does not take."""
    speeds = {}
    for name, flags in {"without": (), "look-up": ("--draft", "ngram"), "model": ("--draft", "llama-3.2-1b")}.items():
        if flags:
            flags += ("--draft-tokens", "3", "--draft-acceptance", "1")
        out = tmp_path / name
        done = lmi_bench(
            *("sweep", "--target", "sim:ml.g5.2xlarge", "-m", "llama-3.1-8b", "--concurrency", "1"),
            *("--input-tokens", "16", "--output-tokens", "201", *flags, "--out", out),
        )
        line = json.loads((out / "levels.jsonl").read_text())
        speeds[name] = line["throughput_tokens_per_s"]
        manifest = json.loads((out / "manifest.json").read_text())
        if flags:
            assert manifest["target"]["speculation"]["draft"] == flags[1]
            assert line["engine"]["draft_acceptance_frac"] == 1.0
            assert line["engine"]["tokens_per_decode"] == 4.0
            assert re.search(r"^ *concurrency 1 .* 100 % +4\.00 *$", done.stdout, re.MULTILINE)
        else:
            assert "speculation" not in manifest["target"]
    assert speeds["without"] < speeds["model"] < speeds["look-up"]
    assert speeds["look-up"] == pytest.approx(4 * speeds["without"], rel=0.1)


def test_look_up_runs_on_the_bundled_engine():
    parts = open_torch_engine("demo-15m", EngineSection(draft="ngram", num_blocks=8, threads=1))
    assert isinstance(parts.drafter, AdaptiveDrafter)
    assert isinstance(parts.drafter.drafter, NgramDrafter)
    assert parts.facts["speculation"] == {"draft": "ngram", "draft_tokens": 4, "draft_adaptive": True}
    fixed = EngineSection(draft="ngram", draft_adaptive=False)
    assert isinstance(drafter_for(fixed, parts.shape, None), NgramDrafter)
