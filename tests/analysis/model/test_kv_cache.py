"""KV-cache bytes against published figures and hand arithmetic."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.model.memory import kv_bytes_per_sequence, kv_bytes_per_token, kv_heads_per_rank
from lmi_bench.catalog.models import all_model_entries, find_model
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import CapacityError


def test_llama_2_7b_takes_half_a_mebibyte_a_token():
    assert kv_bytes_per_token(find_model("llama-2-7b")) == 2 * 32 * 32 * 128 * 2 == 2**19


def test_a_llama_2_7b_sequence_of_4096_tokens_takes_2_gib():
    assert kv_bytes_per_sequence(find_model("llama-2-7b"), 4096) == 2 * 2**30


def test_every_model_agrees_with_the_tables_own_column():
    """The table counted its bytes apart from this code, at both ends of a window."""
    rows = {row["model"]: row for row in read_rows("models.csv")}
    for shape in (entry.shape for entry in all_model_entries()):
        row = rows[shape.name]
        assert kv_bytes_per_token(shape) == int(row["kv_bytes_per_token_16bit_all_layers"])
        far = 10**7
        growth = kv_bytes_per_sequence(shape, far + 1) - kv_bytes_per_sequence(shape, far)
        assert growth == int(row["kv_bytes_per_token_16bit_full_layers"]), shape.name


@pytest.mark.parametrize(("ranks", "expected"), [(1, 131072), (8, 16384), (16, 16384)])
def test_kv_bytes_stop_falling_at_one_head_a_rank(ranks, expected):
    """Llama 3 8B has 8 KV heads: 2 * 32 * 8 * 128 * 2 bytes on one rank."""
    assert kv_bytes_per_token(find_model("llama-3-8b"), tensor_parallel=ranks) == expected


def test_latent_attention_is_cached_once_and_not_divided():
    """DeepSeek-V3: (512 + 64) values, 61 layers, 2 bytes, whatever the degree."""
    shape = find_model("deepseek-v3")
    for ranks in (1, 8):
        assert kv_bytes_per_token(shape, tensor_parallel=ranks) == 576 * 61 * 2


def test_a_sliding_window_stops_growing():
    """Mistral 7B v0.1 slides over 4096 tokens in every layer."""
    shape = find_model("mistral-7b-v0.1")
    assert kv_bytes_per_sequence(shape, 8192) == kv_bytes_per_sequence(shape, 4096)
    assert kv_bytes_per_sequence(shape, 8192) / 8192 == kv_bytes_per_token(shape) / 2


def test_grouped_queries_shrink_the_cache_by_the_group():
    """Mistral 7B has 8 KV heads where Llama 2 7B has 32, all else equal: a quarter."""
    mistral, llama = find_model("mistral-7b-v0.3"), find_model("llama-2-7b")
    assert kv_bytes_per_token(llama) / kv_bytes_per_token(mistral) == 4


def test_uneven_heads_name_the_option_to_change():
    with pytest.raises(CapacityError, match="--tp must divide 8"):
        kv_heads_per_rank(find_model("llama-3-8b"), 3)
