"""What other tools measured is planned with: import, then recommend, for every kind of file."""

from __future__ import annotations

from pathlib import Path

import pytest

import lmi_bench
from lmi_bench.cli import main
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run
from lmi_bench.interchange.imports.read import read_results, write_imported

DATA = Path(__file__).parents[1] / "data"
PATHS = [*(DATA / "imports").iterdir(), *(DATA / "imports_real").iterdir()]
FILES = sorted(path for path in PATHS if path.is_file())
OF_REQUESTS = ("_requests.jsonl", "_responses.json", "_responses.jsonl", "_per_request.json")
WITHOUT_LENGTHS = ("awscurl.json", "inferencex_agg.json")
WITH_FAILURES = (
    "aiperf_requests.jsonl",
    "genai_bench.json",
    "guidellm.json",
    "inference_perf_per_request.json",
    "llmeter_responses.jsonl",
    "llmperf_individual_responses.json",
    "llmperf_summary.json",
    "vllm.json",
)


def imported(path, folder):
    load = Load(2) if path.name.endswith(OF_REQUESTS) else None
    try:
        parts = [read_results(path, load)]
    except InputError:
        parts = [read_results(path, Load(2))]
    write_imported(parts, folder, command=["lmi-bench", "import"])
    return folder


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_imported_run_recommends_or_says_in_one_line_what_it_lacks(path, tmp_path):
    run = imported(path, tmp_path / "run")
    asked = {"model": "llama-3-8b", "measured_on": ["ml.g6e.xlarge"], "instance": ["ml.g6e.xlarge"]}
    lengths = {"input_tokens": 256, "output_tokens": 64}
    if path.name in WITHOUT_LENGTHS + WITH_FAILURES:
        reason = "does not state its input" if path.name in WITHOUT_LENGTHS else "no level can be"
        with pytest.raises(InputError, match=reason):
            lmi_bench.recommend(runs=[run], rate=0.5, **asked, **lengths)
        return
    advice = lmi_bench.recommend(runs=[run], rate=0.5, **asked, **lengths)
    assert advice.answer.recommended.instance == "ml.g6e.xlarge"
    assert advice.basis.profile.name in ("vLLM", "SGLang")
    closed = any(line.load.concurrency for line in load_run(run).levels)
    assert advice.answer.question.calibrated == closed


def test_a_fault_ends_in_one_line_and_a_file_with_its_trace(monkeypatch, capsys):
    def fault(arguments):
        raise KeyError("workload")

    monkeypatch.setattr(main, "app", fault)
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert len(said) == 1
    assert "KeyError: 'workload'" in said[0]
    trace = Path(said[0].rpartition(" ")[2])
    assert "in fault" in trace.read_text("utf-8")
    trace.unlink()
