"""A run that is resumed when it is complete: told from one that is not, and nobody is asked."""

from __future__ import annotations

import json

import pytest

from lmi_bench.cli.sweep_print import print_sweep
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.jobs.sweep.result import finished_run
from lmi_bench.jobs.sweep.run import sweep_scenario
from tests.jobs.hearing import Hearing
from tests.loadgen.ask.test_discover import good_completions, playing, says

ROUTES = {
    ("GET", "/v1/models"): says({"data": [{"id": "m", "owned_by": "x"}]}),
    ("POST", "/v1/completions"): good_completions,
}
LOAD = {"concurrency": [1, 2], "requests_per_user": 2, "warmup_requests": 0}
WORKLOAD = {"input_tokens": 4, "output_tokens": 1}


def scenario_of(url, **load):
    return parse_scenario({"target": url, "workload": WORKLOAD, "load": {**LOAD, **load}})


def finish(folder):
    """A finished sweep of two levels: the address of a server that is gone since, its result."""
    with playing(ROUTES) as (url, _):
        return url, sweep_scenario(scenario_of(url), out=folder)


@pytest.fixture
def finished(tmp_path):
    folder = tmp_path / "run"
    return folder, finish(folder)[0]


def test_a_finished_run_is_printed_again_although_its_server_is_gone(tmp_path, capsys):
    folder = tmp_path / "run"
    url, first = finish(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    print_sweep(first)
    printed = capsys.readouterr().out
    heard = Hearing()
    again = sweep_scenario(scenario_of(url), listener=heard, out=folder, resume=True)
    print_sweep(again)
    assert not again.failed
    assert heard.notes == [f"{folder} is finished, 2 level(s): nothing is left to send"]
    assert ", 2 level(s), 9 requests in " in printed
    assert capsys.readouterr().out == printed
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_is_not_finished_or_not_the_same_is_not_taken_for_it(finished):
    folder, url = finished
    assert finished_run(folder, scenario_of(url)) is not None
    assert finished_run(folder, scenario_of(url, concurrency=[1, 2, 4])) is None
    assert finished_run(folder.parent / "none", scenario_of(url)) is None
    lines = (folder / "levels.jsonl").read_text().splitlines()
    (folder / "levels.jsonl").write_text(lines[0] + "\n")
    assert finished_run(folder, scenario_of(url)) is None


def test_a_run_whose_knees_were_not_written_yet_goes_on(finished):
    folder, url = finished
    (folder / "knees.json").unlink()
    assert finished_run(folder, scenario_of(url)) is None


def test_knees_come_back_as_they_were_written(finished):
    folder, url = finished
    found = finished_run(folder, scenario_of(url))
    kept = json.loads((folder / "knees.json").read_text())
    assert [knee.to_json() for knee in found.knees] == kept


def test_a_level_that_is_sent_again_has_other_prompts(tmp_path):
    """The server may have those of the killed attempt in its prefix cache."""
    folder = tmp_path / "run"
    with playing(ROUTES) as (url, asked):

        def prompts():
            sent = {json.dumps(json.loads(body)["prompt"]) for _, _, body, _ in asked if b'"prompt"' in body}
            asked.clear()
            return sent

        sweep_scenario(scenario_of(url), out=folder)
        before = prompts()
        for name in ("levels.jsonl", "requests.jsonl"):
            lines = (folder / name).read_text().splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line).get("level", json.loads(line).get("index")) == 0]
            (folder / name).write_text("".join(kept))
        resumed = sweep_scenario(scenario_of(url), out=folder, resume=True)
        of_level = [len(records) for records in resumed.run.records]
        assert len(prompts() - before) >= of_level[1]
