"""Every key of a config.json that changes transformers' output changes the engine's alike, or is
refused in one line: a key that is passed over gives wrong text without a word."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
import torch
import transformers

from lmi_bench.core.errors import LmiBenchError
from tests.engine.torch_backend.scores import TOKENS, scores
from tests.engine.torch_backend.tiny_models import FAMILIES

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWS = ["sliding_attention", "full_attention"]
EDITS: list[dict[str, object]] = [
    {"original_max_position_embeddings": 16, "rope_scaling": YARN},
    {"original_max_position_embeddings": 16, "rope_scaling": LLAMA3, "rope_parameters": None},
    {"rope_parameters": YARN | {"original_max_position_embeddings": 16}},
    {"rope_parameters": YARN | {"attention_factor": 1.5}},
    {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "factor": 8.0}},
    {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}},
    {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 16}},
    {"rope_parameters": {"type": "linear", "factor": 3.0}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    {"rope_parameters": {"rope_type": "proportional", "rope_theta": 500.0}},
    {"rope_parameters": {"rope_theta": 777.0}, "rope_theta": 99.0},
    {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": {"rope_theta": 99.0}},
    {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0}},
    {"rope_parameters": {"mrope_section": [2, 3, 3], "rope_theta": 500.0}},
    {"rope_parameters": {kind: {"rope_theta": 500.0} for kind in WINDOWS}},
    {"rope_parameters": None, "rope_theta": 500.0},
    {"rope_parameters": None, "partial_rotary_factor": 0.5},
    {"rope_parameters": None, "rope_local_base_freq": 300.0},
    {"layer_types": WINDOWS, "sliding_window": 7},
    {"layer_types": WINDOWS[::-1], "sliding_window": 7, "use_sliding_window": True},
    {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 7},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0, "layer_types": None},
    {"sliding_window_pattern": 2, "layer_types": None, "sliding_window": 7},
    {"no_rope_layers": [1, 0]},
    {"no_rope_layer_interval": 2, "no_rope_layers": None},
    {"tie_word_embeddings": True},
    *({"hidden_act": name} for name in ("swish", "gelu", "gelu_pytorch_tanh", "relu", "relu2")),
    {"hidden_activation": "gelu"},
    *({key: 0.5} for key in ("partial_rotary_factor", "rms_norm_eps", "layer_norm_epsilon")),
    *({key: 3.0} for key in ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")),
    *({key: 0.6} for key in ("attention_multiplier", "embedding_multiplier", "logits_scaling")),
    *({key: 0.6} for key in ("residual_multiplier", "logit_scale", "embedding_scale")),
    *({key: 9} for key in ("query_pre_attn_scalar", "sliding_window", "attention_chunk_size")),
    *({key: True} for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qk_norm")),
    *({key: True} for key in ("alibi", "use_bidirectional_attention", "add_cross_attention")),
    *({key: 1} for key in ("num_experts_per_tok", "topk_group", "first_k_dense_replace")),
    *({key: [0]} for key in ("mlp_only_layers", "moe_layers")),
    {"mlp_layer_types": ["dense", "sparse"]},
    {"decoder_sparse_step": 2},
    {"norm_topk_prob": True},
    {"scoring_func": "softmax"},
    {"pretraining_tp": 2},
]
"""Settings of several families, tried on each; every key of a family's own config is besides."""
PLACES: list[dict[str, object]] = [
    *({"rope_parameters": value} for value in (None, YARN)),
    *({"rope_scaling": value} for value in (YARN, {"type": "linear", "factor": 3.0})),
    {"rope_theta": 500.0},
    {"rope_local_base_freq": 300.0},
    {"partial_rotary_factor": 0.5},
    {"max_position_embeddings": 32},
    {"original_max_position_embeddings": 16},
    *({"sliding_window": value} for value in (None, 7)),
    *({"layer_types": value} for value in (None, WINDOWS)),
    {"use_sliding_window": True},
    {"max_window_layers": 1},
    {"sliding_window_pattern": 2},
]
"""Settings of positions and windows, of which one may change what another means."""


def other_values(value: object) -> list[object]:
    """Values of the same kind that a file could have in this one's place."""
    match value:
        case bool():
            return [not value, None]
        case int():
            return [value + 1, max(1, value // 2), None]
        case float():
            return [value * 1.5 + 0.1, None]
        case None:
            return [8, 0.5, True]
        case [first, *_]:
            return [value[::-1], [first] * len(value), None]
        case dict():
            inner = [(key, other) for key, v in value.items() for other in other_values(v)]
            return [value | {key: other} for key, other in inner]
    return [None]


def edits_of(config: dict[str, object]) -> list[dict[str, object]]:
    """The common edits, and each key of this file changed alone."""
    untouched = {"architectures", "model_type", "dtype", "transformers_version"}
    own = [
        {key: other}
        for key, value in config.items()
        if key not in untouched and not key.endswith("token_id")
        for other in other_values(value)
    ]
    return EDITS + own


def theirs(folder: Path) -> torch.Tensor | None:
    """As `scores`, of transformers; None where it does not take the folder."""
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        if told["missing_keys"] or told["mismatched_keys"]:  # it makes weights up
            return None
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([TOKENS])).logits[0, :-1]
    except Exception:  # noqa: BLE001 - it raises anything at all
        return None
    found = torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]
    return found if bool(found.isfinite().all()) else None


def with_config(folder: Path, place: Path, config: dict[str, object]) -> Path:
    place.mkdir(exist_ok=True)
    for path in folder.glob("*.safetensors*"):
        if not (place / path.name).exists():
            os.link(path, place / path.name)
    (place / "config.json").write_text(json.dumps(config))
    return place


def check_all(folder: Path, place: Path, edits: Iterable[dict[str, object]], least: int) -> None:
    """Every edit is refused, or equal to transformers; `least` are compared."""
    config = json.loads((folder / "config.json").read_text())
    wrong, refusals, equal = [], [], 0
    for edit in edits:
        changed = with_config(folder, place, copy.deepcopy(config | edit))
        try:
            ours = scores(changed)
        except LmiBenchError as exc:
            refusals.append(str(exc))
            continue
        wanted = theirs(changed)
        if wanted is None:
            continue
        equal += 1
        if (ours - wanted).abs().max() > 1e-4:
            wrong.append(edit)
    assert not wrong
    assert not any("\n" in each for each in refusals)
    assert equal > least


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_key_is_refused_or_gives_what_transformers_gives(make_model, tmp_path, family):
    folder = make_model(family).folder
    config = json.loads((folder / "config.json").read_text())
    check_all(folder, tmp_path / "model", edits_of(config), 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_changed_keys_are_refused_or_give_what_transformers_gives(make_model, tmp_path, family):
    pairs = [one | two for one, two in combinations(PLACES, 2) if not one.keys() & two.keys()]
    some = pairs[list(FAMILIES).index(family) % 3 :: 3]  # neighbours in the table share most of the code
    check_all(make_model(family).folder, tmp_path / "model", some, 6)
