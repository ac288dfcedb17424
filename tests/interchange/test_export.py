"""A run for other programs: nothing lost, nothing made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import yaml

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest, RunScenario, RunWorkload, TargetFacts
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.run_store import RunStore, load_run
from lmi_bench.core.workload import LevelSpec
from lmi_bench.interchange.export import export_run, hardware, level_table
from lmi_bench.interchange.imports.read import read_results
from tests.core.test_run_store import no_room

PUBLISHED_COLUMNS = (
    *("model", "instance", "accelerator", "n_accelerators", "tp", "instance_count"),
    *("total_tokens", "input_tokens", "output_tokens", "concurrency"),
    *("throughput_tokens_per_s", "latency_ms_per_token", "table"),
)


def level(users, n, stopped_by=None):
    """Answers of 4 tokens: the first after 100 ms, then one each 50 ms."""
    records = tuple(
        RequestRecord(i, float(i), Exchange(float(i), tuple(i + t for t in (0.1, 0.15, 0.2, 0.25))), input_tokens=8)
        for i in range(n)
    )
    spec = LevelSpec(users - 1, Load(concurrency=users), num_requests=n)
    return LevelRun(spec, 1, records, stopped_by)


@pytest.fixture
def run(tmp_path):
    manifest = Manifest(
        scenario=RunScenario(model="tiny", workload=RunWorkload(input_tokens=8, output_tokens=4)),
        scenario_hash="h",
        target=TargetFacts("simulated", "tiny", "ml.g5.12xlarge", tensor_parallel=4),
    )
    with RunStore.create(tmp_path / "run", manifest) as store:
        for each in (level(1, 300), level(2, 40, "timeout")):
            store.append_level(each.records, summarise_level(each))
    return load_run(tmp_path / "run")


def test_the_level_table_begins_with_the_published_columns(run):
    table = level_table(run)
    assert tuple(table.columns[: len(PUBLISHED_COLUMNS)]) == PUBLISHED_COLUMNS
    row = table.iloc[0]
    assert (row.accelerator, row.n_accelerators, row.tp) == ("A10G", 4, 4)
    assert (row.input_tokens, row.output_tokens, row.total_tokens) == (8, 4, 12)
    assert row.latency_ms_per_token == pytest.approx(250 / 4)
    assert row.throughput_tokens_per_s == pytest.approx(1200 / 299.25)


@pytest.mark.parametrize(
    ("facts", "count"),
    [
        (TargetFacts("sagemaker", instance="ml.g5.2xlarge", instances=3), 3),
        (TargetFacts("simulated", instance="ml.g5.2xlarge"), 1),
        (TargetFacts("http"), None),
    ],
)
def test_the_table_counts_the_instances_of_an_endpoint(run, facts, count):
    endpoint = replace(run, manifest=replace(run.manifest, target=facts))
    assert hardware(endpoint)["instance_count"] == count


def test_a_level_that_was_cut_short_leaves_its_cells_empty(run):
    row = level_table(run).iloc[1]
    assert row.stopped_by == "timeout"
    assert pd.isna(row.throughput_tokens_per_s)
    assert pd.isna(row.latency_ms_per_token)


@pytest.mark.parametrize("export_format", ["csv", "parquet"])
def test_tables_read_back_as_they_were_written(run, tmp_path, export_format):
    if export_format == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
    read = pd.read_csv if export_format == "csv" else pd.read_parquet
    levels, requests = (read(path) for path in export_run(run, export_format, tmp_path / "out"))
    assert list(levels["requests"]) == [300, 40]
    assert len(requests) == 340
    assert requests["ttft_ms"].tolist() == pytest.approx([100.0] * 340)
    assert requests["tpot_ms"].iloc[0] == pytest.approx(50)


@pytest.mark.parametrize(
    ("export_format", "name"), [("csv", "requests.csv"), ("json", "run.json"), ("llm-d", "level-1.yaml")]
)
def test_no_file_is_written_through_a_link_or_left_torn(run, tmp_path, export_format, name):
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.write_text("kept")
    (out / name).symlink_to(outside)
    with pytest.raises(InputError, match=f"{name} is a symbolic link"):
        export_run(run, export_format, out)
    (out / name).unlink()
    outside.rename(out / name)
    with no_room(), pytest.raises(InputError, match=r"cannot write .*: File too large"):
        export_run(run, export_format, out)
    assert (out / name).read_text() == "kept"
    assert not list(out.glob("*.new"))


def test_json_holds_the_lines_as_they_are(run, tmp_path):
    (path,) = export_run(run, "json", tmp_path / "out")
    assert json.loads(path.read_text())["levels"] == [level.to_json() for level in run.levels]


def test_an_llm_d_report_names_its_units_and_comes_back_as_it_was(run, tmp_path):
    paths = export_run(run, "llm-d", tmp_path / "out")
    report = yaml.safe_load(paths[0].read_text())
    aggregate = report["results"]["request_performance"]["aggregate"]
    assert report["version"] == "0.2"
    assert aggregate["latency"]["time_to_first_token"]["units"] == "ms"
    assert aggregate["latency"]["time_to_first_token"]["p90"] == pytest.approx(100)
    assert aggregate["latency"]["time_per_output_token"]["units"] == "ms/token"
    assert aggregate["throughput"]["output_token_rate"]["units"] == "tokens/s"
    engine = report["scenario"]["stack"][0]["standardized"]
    assert engine["accelerator"] == {"model": "A10G", "count": 4, "parallelism": {"dp": 1, "ep": 1, "pp": 1, "tp": 4}}
    (imported,) = read_results(paths[0]).levels
    back = imported.level.to_json()
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "latency_ms_per_token"):
        assert back[key]["mean"] == pytest.approx(run.levels[0].to_json()[key]["mean"])
    assert back["throughput_tokens_per_s"] == run.levels[0].throughput_tokens_per_s
    assert back["concurrency"] == 1


def test_an_empty_run_has_nothing_to_export(tmp_path):
    RunStore.create(tmp_path / "run", Manifest()).close()
    with pytest.raises(InputError, match="no finished level"):
        export_run(load_run(tmp_path / "run"), "csv", tmp_path / "out")
