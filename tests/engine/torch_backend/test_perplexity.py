"""`lmi-bench perplexity` against transformers' own log-probabilities of the same windows."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from lmi_bench.engine.texts import EVALUATION, read_text
from tests.end_to_end.commands import lmi_bench


@torch.no_grad()
def reference(folder, length, max_tokens, config=None):
    """Perplexities over whole windows and over their second halves."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, config=config)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(read_text(None, EVALUATION)).ids
    windows = torch.tensor(ids[:max_tokens]).unfold(0, length, length)
    logprobs = model(windows).logits.double().log_softmax(-1)[:, :-1]
    each = logprobs.gather(2, windows[:, 1:, None]).squeeze(2)
    return math.exp(-each.mean()), math.exp(-each[:, length // 2 - 1 :].mean())


def test_windows_of_each_length_have_transformers_perplexity(trained, tmp_path):
    out = tmp_path / "out.json"
    given = ("--lengths", "32,128,400", "--rope-scaling", "linear:2", "--max-tokens", "1200")
    done = lmi_bench("perplexity", "-m", str(trained), *given, "--json", str(out))
    assert "256 positions" in done.stdout
    rows = {(row["rope_scaling"], row["length"]): row for row in json.loads(out.read_text())["lengths"]}
    assert set(rows) == {(None, 32), (None, 128), ("linear:2", 32), ("linear:2", 128), ("linear:2", 400)}
    stretched = transformers.AutoConfig.from_pretrained(trained)
    stretched.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for (scaling, length), row in rows.items():
        whole, far = reference(trained, length, 1200, stretched if scaling else None)
        assert row["perplexity"] == pytest.approx(whole, rel=1e-4)
        assert row["far_perplexity"] == pytest.approx(far, rel=1e-4)
        assert row["tokens"] == (1200 // length) * (length - 1)
    # positions halved without training are worse, which is the caution that the command is for
    assert rows["linear:2", 128]["perplexity"] > 1.05 * rows[None, 128]["perplexity"]


def test_a_text_shorter_than_a_window_is_refused(trained, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("short")
    done = lmi_bench("perplexity", "-m", str(trained), "--text", str(text), expect=2)
    assert "fewer than one window of 128" in done.stderr
