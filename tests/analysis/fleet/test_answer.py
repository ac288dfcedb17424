"""What `recommend --json` writes is read back as the value that it was written from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import RequestKind, Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.analysis.model.setup import Speculation
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.slo import parse_slo

LLAMA = find_model("llama-2-7b")
REQUEST = RecommendRequest(
    Workload(LLAMA, "float16", 256, 256),
    TGI_2023,
    load=Load(rate_per_s=2.0),
    slos=(parse_slo("ttft_p90<=1s"),),
    instances=(find_instance("ml.g5.2xlarge"), find_instance("ml.p5en.48xlarge")),
)
SETTINGS = (
    AS_STATED,
    EngineSetting(kv_dtype="float8", max_batch_size=16, chunked_prefill=True),
    EngineSetting(speculation=Speculation(4, 0.7, find_model("llama-3.2-1b")), copies=1),
)
KINDS = (RequestKind(100, 20, 3), RequestKind(900, 10, 0.5))


def read_back(answer):
    return Recommendation.from_json(json.loads(json.dumps(answer.to_json())))


@pytest.mark.parametrize(
    "asked",
    [
        replace(REQUEST, simulate_long=True),
        replace(REQUEST, settings=SETTINGS),
        replace(REQUEST, load=Load(40, think_time_s=3.0)),
        replace(REQUEST, workload=Workload.mixed(LLAMA, "int4", KINDS, burstiness=0.5)),
        replace(REQUEST, slos=(parse_slo("itl_p50<=1ms"),)),
    ],
)
def test_an_answer_is_read_back_but_for_levels_to_measure(asked):
    answer = recommend(asked)
    again = read_back(answer)
    known = replace(answer, measure_next=())
    assert again == known
    assert json.dumps(again.to_json()) == json.dumps(known.to_json())


@pytest.fixture(scope="module")
def written():
    return json.dumps(recommend(REQUEST).to_json())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.pop("candidates"), "without 'candidates'"),
        (lambda content: content["recommended"].pop("cost"), "has no `cost`"),
        (lambda content: content["recommended"].update(instances="two"), "instances must be a whole number, not 'two'"),
        (lambda content: content["recommended"].update(ttft_p90_ms={"predicted": "x"}), "'x'"),
        (lambda content: content["recommended"]["setting"].update(colour=1), "colour"),
        (lambda content: content.update(recommended=[]), "this version"),
        (lambda content: content.update(schema_version=0), "schema version 0"),
    ],
)
def test_a_damaged_file_or_one_of_another_version_is_one_line(written, change, says):
    content = json.loads(written)
    change(content)
    with pytest.raises(InputError, match=says) as refused:
        Recommendation.from_json(content)
    assert "run recommend --json again" in str(refused.value)
    assert "\n" not in str(refused.value)
