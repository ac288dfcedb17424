"""A prediction counts every option that it takes, or refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_bench.cli.plan_print import print_prediction
from lmi_bench.core.errors import InputError
from lmi_bench.jobs import predict as job
from lmi_bench.jobs.predict import predict
from lmi_bench.jobs.settings.plan import PredictSettings
from lmi_bench.jobs.settings.recommend import RecommendSettings

EQUAL = {"input_tokens": 100, "output_tokens": 30}


def asked(model="llama-3.1-8b", instance="ml.g5.48xlarge", **options):
    return PredictSettings(model, instance, **({"concurrency": "2"} | options))


@pytest.mark.parametrize(
    "lengths",
    [
        {"mix": "60000/500,100/10:99"},
        {"input_lengths": "uniform(10,60000)", "output_tokens": 500},
        {"trace": Path("long.csv"), "concurrency": None},
    ],
    ids=str,
)
def test_the_degree_without_tp_holds_the_longest_request(tmp_path, monkeypatch, lengths):
    """16 GB of weights and 2 x 32 layers x 8 heads x 128 x 2 B = 131 kB a token: 60,500 tokens are
    7.9 GB more, beyond 90 % of an A10G's 24 GB less what the engine needs."""
    monkeypatch.chdir(tmp_path)
    Path("long.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:01:01.0000000,60000,500\n2023-11-16 18:01:03.0000000,100,10\n"
    )
    monkeypatch.setattr(job.predicted, "simulated_forecast", lambda *_, **__: None)
    equal = predict(asked(input_tokens=60_000, output_tokens=500)).setup.tensor_parallel
    assert predict(asked(**lengths)).setup.tensor_parallel == equal == 2


def test_the_tokens_of_a_cache_count_on_this_machine_too(monkeypatch):
    monkeypatch.setattr(job.predicted, "forecast", lambda *_: None)
    found = predict(asked("demo-15m", "local", kv_tokens=300, **EQUAL))
    assert found.profile.cache_tokens == 300
    assert "was not fitted on local or elsewhere: its" in " ".join(found.warnings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mix": "100/50", "input_tokens": 4000}, "--isl 4000 and --mix 100/50 both state lengths"),
        ({"input_lengths": "uniform(4,9)", **EQUAL}, "both state lengths: leave one out"),
        ({"trace": Path("az.csv"), "output_tokens": 9}, "--osl 9 and --trace az.csv both state"),
        ({"prefix_hit": 0.9, "prefix_cache": False, **EQUAL}, "--no-prefix-cache out"),
        ({"network_gbps": 1.0, **EQUAL}, "--network-gbps is between machines: add --hosts"),
    ],
)
def test_an_option_that_would_not_count_is_refused(options, said):
    with pytest.raises(InputError, match=said):
        asked(**options)
    if "trace" in options:
        with pytest.raises(InputError, match=said):
            RecommendSettings(**options)


@pytest.mark.parametrize(
    "lengths",
    [{"input_tokens": 100, "output_tokens": 1}, {"input_lengths": "uniform(50,99)", "output_tokens": 1}],
    ids=str,
)
def test_answers_of_one_token_have_no_tpot(lengths, capsys):
    found = predict(asked(**lengths))
    (row,) = found.to_json()["predictions"]
    assert row["tpot_ms"] is None
    assert row["ttft_ms"]["predicted"] > 0
    print_prediction(found)
    assert "TPOT -: an answer of one token has none" in capsys.readouterr().out


def test_a_network_counts_beside_pools_and_hosts():
    for more in ({"disaggregate": "1:1"}, {"hosts": 2, "tensor_parallel": 16}):
        assert asked(network_gbps=100.0, **more, **EQUAL).network_gbps == 100.0


def test_documents_are_predicted_with_a_warm_cache():
    """160 of 200 tokens are one of forty documents, which all fit; 200 requests from an empty cache
    on would find 0.66."""
    (found,) = predict(
        asked(input_tokens=200, output_tokens=2, documents="40x160", concurrency=None, rate="2")
    ).simulated
    assert found.prefix_hit.value == pytest.approx(0.8, abs=0.03)
