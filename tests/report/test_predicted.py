"""What the planner's model adds to a page: intervals of simulated levels, and rooflines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fit.fit import fit_of_profile
from lmi_bench.analysis.fit.forecast import forecast
from lmi_bench.analysis.fit.from_run import level_uncertainties
from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import TargetFacts
from lmi_bench.report.explore import fleet_roofline
from lmi_bench.report.run_view import build_run_view
from lmi_bench.report.view import build_view
from tests.report.conftest import make_run
from tests.report.figures import figures_of

FACTS = TargetFacts(
    kind="simulated",
    model="llama-2-7b",
    instance="ml.g5.2xlarge",
    tensor_parallel=1,
    dtype="float16",
    profile="vLLM 0.12",
    profile_provenance=VLLM_0_12.provenance,
)


def simulated(run, **facts):
    return replace(run, manifest=replace(run.manifest, target=replace(FACTS, **facts)))


@pytest.fixture(scope="module")
def predicted():
    return simulated(make_run("", loads=(1, 4, 16)))


def test_a_predicted_curve_has_the_intervals_that_predict_gives(predicted):
    """The same model, machine, lengths and load: the same ratio of the interval's ends."""
    curve = build_run_view(predicted, label="", anchor="").curve
    cell = MeasuredLevel(
        Setup(find_model("llama-2-7b"), find_instance("ml.g5.2xlarge"), 1, "float16"),
        input_tokens=256,
        output_tokens=48,
        load=Load(4),
        num_requests=12,
    )
    figures = forecast(fit_of_profile(VLLM_0_12, [cell]), cell).figures
    shown = {
        ("ttft_ms", "mean"): curve.values["ttft_ms", "mean"],
        ("throughput_tokens_per_s", ""): curve.values["throughput_tokens_per_s", ""],
    }
    for (key, statistic), values in shown.items():
        low, high = curve.bands[key, statistic][1]
        assert low / values[1] == pytest.approx(figures[key].low / figures[key].value)
        assert high / values[1] == pytest.approx(figures[key].high / figures[key].value)


def test_the_bands_are_drawn_and_shown_in_the_table_and_on_hover(predicted):
    view = build_view([predicted])
    data = figures_of(view)["chart-ttft-ms"]["data"]
    areas = [trace for trace in data if trace.get("fill") == "toself"]
    lines = [trace for trace in data if "customdata" in trace]
    low, high = view.runs[0].curve.bands["ttft_ms", "mean"][0]
    assert (areas[0]["y"][0], areas[0]["y"][-1]) == (high, low)
    assert areas[0]["legendgroup"] == lines[0]["legendgroup"]
    assert lines[0]["customdata"][0] == f"concurrency 1, 80 % {low:,.4g} to {high:,.4g}"
    assert [row.cells[5].interval != "" for row in view.runs[0].levels.rows] == [True] * 3


def test_what_is_not_known_has_no_interval(predicted, sweep):
    """A measured run, a profile that is not at hand, a model without a shape."""
    for run in (
        sweep,
        simulated(predicted, profile_provenance="profile mine, fitted to my levels"),
        simulated(predicted, model="no such model", instance="ml.none"),
    ):
        assert level_uncertainties(run, run.levels) == {}


def test_the_working_point_of_a_fleet_by_hand(recommendation):
    """2,430 tok/s over two machines with a copy each, 40 ms between tokens: 48.6 sequences a step.

    Llama 2 7B at TP 4: 13.48 GB of weights and, for a context of 256 + 128, 201 MB of cache a
    sequence, over 4 A10G of 70 TFLOP/s and 600 GB/s; two FLOP a parameter and token.
    """
    answer = Recommendation.from_json(recommendation)
    roof = fleet_roofline(answer, answer.recommended)
    assert (roof["device"], roof["peak"], roof["bandwidth"]) == ("A10G", 70, 0.6)
    (point,) = roof["points"]
    assert point["batch"] == pytest.approx(48.6)
    params, cache_bytes = 6.738e9, 384 * 2 * 32 * 4096 * 2
    intensity = 2 * params * 48.6 / (2 * params + 48.6 * cache_bytes)
    assert point["x"][0] == pytest.approx(intensity, rel=2e-3)
    assert point["x"][1] < point["x"][0] < point["x"][2]
    assert point["y"][0] == pytest.approx(2 * params * 1215 / 4 / 1e12, rel=2e-3)
    assert point["y"][1:] == pytest.approx([0.9 * point["y"][0], 1.1 * point["y"][0]], rel=2e-3)
