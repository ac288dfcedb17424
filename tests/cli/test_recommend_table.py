"""What a buyer sees: intervals everywhere, columns that give way, reasons that are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fleet.answer import SloOutlook
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Rejection, Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import stdout
from lmi_bench.cli.recommend_print import answer_lines, candidate_rows, distinct_layouts, print_advice, rejection_lines
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.slo import Slo
from lmi_bench.jobs.planned import engine_axes, first_dtype
from lmi_bench.jobs.recommend import Advice, Basis
from lmi_bench.jobs.settings.planning import DraftSettings
from lmi_bench.jobs.settings.recommend import AxisSettings

REQUEST = RecommendRequest(
    Workload(find_model("llama-2-7b"), "float16", 128, 16),
    TGI_2023,
    load=Load(rate_per_s=4.0),
    slos=(Slo("itl", "p90", 90.0),),
    instances=(find_instance("ml.g5.2xlarge"), find_instance("ml.p4d.24xlarge")),
    degrees=(1,),
    simulate_long=True,
)


@pytest.fixture(scope="module")
def answer():
    return recommend(REQUEST)


@pytest.mark.parametrize("width", [80, 120, 180])
def test_rows_fit_the_terminal_and_say_what_had_no_room(answer, width):
    rows, left_out = candidate_rows(answer.candidates, width)
    columns = [max(*map(len, n.split()), *(len(r[n]) for r in rows)) for n in rows[0]]
    needed = sum(columns) + 3 * (len(columns) - 1)
    assert needed <= width
    assert {"fleet", "USD/h", "ITL p90 ms"} <= rows[0].keys()
    assert not set(left_out) & rows[0].keys()


def test_every_figure_of_a_wide_table_has_its_interval(answer):
    (row, *_), left_out = candidate_rows(answer.candidates, 500)
    assert row["tok/s"] == "64"  # what arrives is served: 4 req/s of 16 tokens, no doubt
    for name in ("capacity req/s", "ITL p50 ms", "TTFT p90 ms", "ms/token p90", "ITL p90 ms"):
        predicted, _, rest = row[name].partition(" [")
        low, high = rest.split("]")[0].split("-")
        assert float(low) <= float(predicted.removesuffix(" ?")) <= float(high)
    assert not left_out


def test_a_figure_under_an_slo_stands_in_one_column(answer):
    outlook = SloOutlook("latency_per_token_p90<=500ms", 60.0, 500.0, 440.0, "likely")
    ((row,), _) = candidate_rows([replace(answer.candidates[0], slos=(outlook,))], 500)
    assert [name for name in row if "token" in name] == ["ms/token p90"]
    assert " ? [" in row["ms/token p90"]


def test_of_each_layout_the_best_setting_is_shown(answer):
    settings = (AS_STATED, EngineSetting(max_batch_size=2))
    several = recommend(RecommendRequest(**{**fields(REQUEST), "settings": settings}))
    assert len(several.candidates) == 2 * len(answer.candidates)
    shown = distinct_layouts(several.candidates)
    assert len(shown) == len(answer.candidates)
    assert shown[0] is several.candidates[0]


def fields(request):
    return {name: getattr(request, name) for name in request.__slots__}


def test_reasons_that_differ_in_numbers_are_one_kind_with_an_example():
    rejected = [
        Rejection("ml.a", 1, 1, "13.5 GiB exceed 8.0 GiB"),
        Rejection("ml.b", 2, 1, "6.7 GiB exceed 4.0 GiB"),
        Rejection("ml.c", None, None, "no source states it"),
    ]
    assert list(rejection_lines(rejected, 1)) == [
        "3 layouts are out:",
        "    2  such as ml.a TP 1: 13.5 GiB exceed 8.0 GiB",
        "  more kinds of reason: 1, in the --json file",
    ]


def test_the_answer_is_what_to_rent_what_it_carries_and_the_next_command(answer):
    lines = list(answer_lines(answer))
    text = "\n".join(lines)
    best = answer.recommended
    assert lines[0].startswith(f"recommended: {best.instances} x {best.instance}, TP 1")
    assert f"USD {best.price_usd_per_hour:,.2f} per hour" in text
    assert "4 asked for" in text
    assert "% of requests keep it; worst five minutes: " in text
    assert lines[-2].endswith(f", then repeat this command with RUN --measured-on {best.instance}")
    assert lines[-1].startswith("    lmi-bench sweep URL --input-tokens 128 --output-tokens 16 ")
    assert len(lines) <= 10


def test_a_pooled_quantile_that_few_requests_keep_is_fragile_and_the_next_fleet_is_offered(answer):
    slo = answer.recommended.slos[0].slo
    kept = answer.recommended.attainment
    best = replace(answer.candidates[0], attainment=replace(kept, attainment={slo: 0.71}))
    changed = replace(answer, recommended=best, candidates=(best, answer.recommended))
    text = "\n".join(answer_lines(changed))
    assert ", fragile; 71.0% of requests keep it" in text
    assert f"not fragile: {answer.recommended.instances} x " in text
    assert "fragile" not in "\n".join(answer_lines(answer))


@pytest.mark.parametrize("explain", [False, True])
def test_the_answer_comes_first_and_the_reasons_on_request(answer, explain, capsys):
    stdout.cache_clear()
    basis = Basis(REQUEST.profile, None, REQUEST.workload, "llama-2-7b")
    print_advice(Advice(answer, REQUEST, basis, ()), explain=explain)
    stdout.cache_clear()
    said = capsys.readouterr().out
    assert said.startswith("recommended: ")
    assert said.count("\n") <= 60
    assert ("failure unit" in said) == explain
    assert ("--explain" in said) != explain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"chunked_prefill": "yes"}, "--chunked-prefill yes: write on, off or both"),
        ({"max_batch": "many"}, "--max-batch many: write whole numbers"),
        ({"memory_share": "0.9;0.8"}, "--memory-share"),
        ({"speculation": DraftSettings(draft="ngram")}, "--draft-acceptance"),
        ({"speculation": DraftSettings(draft="mtp")}, r"llama-3.1-70b has no .*MTP.*deepseek-v3"),
    ],
)
def test_a_flag_that_cannot_be_read_names_its_form(flags, message):
    with pytest.raises(InputError, match=message):
        engine_axes(AxisSettings(**flags), find_model("llama-3.1-70b"))


def test_flags_are_lists_and_the_first_format_is_the_one_to_compare_with():
    flags = AxisSettings(dtype="fp16,int4", graphs="on,off", memory_share="0.8, 0.9")
    axes = engine_axes(flags, find_model("llama-3.1-70b"))
    assert first_dtype(flags) == "float16"
    assert axes["cuda_graphs"] == (True, False)
    assert axes["memory_share"] == (0.8, 0.9)
