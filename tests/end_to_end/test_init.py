"""`init`: answers are checked at once, the printed command works, and no secret is written."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmi_bench.catalog.models import find_model
from lmi_bench.cli.main import app
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Silent
from lmi_bench.core.scenario import load_scenario
from lmi_bench.jobs.init import init
from lmi_bench.jobs.planned import rate_of, workload_of
from lmi_bench.jobs.settings.setup import InitSettings
from lmi_bench.targets.prompts import DEMO_NAMES, DEMO_POSITIONS
from tests.docs.pages import ROOT
from tests.end_to_end.commands import command, environment


class Heard(Silent):
    """Keeps the warnings: why an answer was not taken."""

    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*answers, **stated):
    """The scenario of these answers, in the order of the questions, and why some were refused."""
    left = list(answers)
    heard = Heard()
    file = Path("s.yaml")
    command = init(
        InitSettings(file=file, **stated), heard, (lambda _, default: left.pop(0) or default) if answers else None
    )
    assert not left
    return load_scenario(file), heard.warnings, command


def test_every_wrong_answer_is_refused_at_once_and_asked_again():
    Path("requests.log").write_text("")
    scenario, refused, _ = write(
        "everything",
        "endpoint",
        "http://me:pw@host",
        "host:80",
        "http://host:80/v1?api-key=1",
        "http://host:80",
        "",
        "0",
        "requests.log",
        "normal(622,100)",
        "-3",
        "64",
        "1,x",
        "0",
        "rate 0.5,1",
        "fast",
        "ttft_p90<=1s, itl_p90<=60ms",
    )
    assert (scenario.target, scenario.model) == ("http://host:80", "auto")
    assert scenario.workload.input_lengths == "normal(622,100)"
    assert scenario.workload.output_tokens == 64
    assert scenario.load.rate_per_s == (0.5, 1.0)
    assert scenario.slo == ("ttft_p90<=1s", "itl_p90<=60ms")
    said = ["none of", "password", "no endpoint", "password", "greater than 0", "workload from"]
    said += ["-3", "'x'", "greater than 0", "SLO 'fast'"]
    assert [part in text for part, text in zip(said, refused, strict=True)] == [True] * 10


def test_the_printed_command_of_a_sweep_works_as_printed():
    stated = {"target": "sim:ml.g5.2xlarge", "concurrency": "1", "output_tokens": "4"}
    words = shlex.split(write(yes=True, **stated)[2])
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_a_plans_file_states_all_that_recommend_reads():
    write(kind="plan", model="llama-2-7b", input_tokens="99", output_tokens="9", rate="0.5")
    read = load_scenario(Path("s.yaml"))
    assert (read.model, rate_of(read), read.slo) == ("llama-2-7b", 0.5, ("ttft_p90<=1s",))
    workload = workload_of(read, "s.yaml", find_model(read.model), "float16")
    assert (workload.input_tokens, workload.output_tokens) == (99, 9)


@pytest.mark.parametrize("kind", ["endpoint", "engine", "simulated", "plan"])
def test_the_defaults_of_every_kind_are_a_scenario_with_a_comment_on_each_field(kind):
    scenario, _, command = write(yes=True, kind=kind)
    assert command.endswith("recommend --workload s.yaml" if kind == "plan" else "sweep s.yaml")
    assert all("#" in line for line in Path("s.yaml").read_text().splitlines() if line[-1] != ":")
    assert scenario.target.startswith({"endpoint": "http:", "simulated": "sim:"}.get(kind, "engine"))


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, "give --kind, --target, --model, --input-tokens, --output-tokens, --concurrency or"),
        ({"kind": "plan", "rate": "1"}, "give --model, --input-tokens, --output-tokens, or --yes"),
        ({"target": "https://u:p@h/"}, "give --model"),
        ({"target": "https://u:p@h/", "yes": True}, "LMI_BENCH_API_KEY"),
        ({"target": "https://h/?my_token=1", "yes": True}, "LMI_BENCH_API_KEY"),
        ({"target": "nowhere", "yes": True}, "URL"),
        ({"target": "sim:ml.g5.xlarge", "model": "llama-3-70b", "yes": True}, "exceed"),
        ({"kind": "plan", "target": "engine", "yes": True}, "excludes"),
        ({"kind": "plan", "model": "demo-15m", "yes": True}, "name the model"),
        ({"kind": "plan", "model": "lama-2-7b", "yes": True}, "nearest"),
        ({"kind": "engine", "output_tokens": "2000", "yes": True}, "2,064 tokens exceeds"),
        ({"rate": "1", "concurrency": "1", "yes": True}, "not both"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_nothing_is_written(stated, said):
    with pytest.raises(InputError) as caught:
        write(**stated)
    assert said in str(caught.value)
    assert "u:p" not in str(caught.value)
    assert not Path("s.yaml").exists()


@pytest.mark.parametrize("demo", DEMO_NAMES)
def test_a_demo_model_has_the_positions_that_are_checked(demo):
    from lmi_bench.engine.torch_backend.demo import ensure_demo_model

    config = json.loads((ensure_demo_model(demo) / "config.json").read_text())
    assert config["max_position_embeddings"] == DEMO_POSITIONS


def test_a_file_is_replaced_only_with_consent():
    Path("s.yaml").write_text("mine")
    for answers, stated in (((), {"yes": True}), (("no",), {})):
        with pytest.raises(InputError, match="exists and is unchanged"):
            write(*answers, **stated)
        assert Path("s.yaml").read_text() == "mine"
    assert write("yes", "engine", *[""] * 5)[0].target == "engine"
    assert write(yes=True, force=True, kind="plan")[0].model == "qwen3-8b"


@pytest.mark.parametrize("end", ["signal", "end of input"])
def test_an_end_in_the_middle_leaves_no_file_and_no_traceback(folder, end):
    """In a terminal of its own, as a person has it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("init", "s.yaml", "--kind", "engine"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment(), "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)

    def read_until(word: bytes) -> bytes:
        seen = b""
        while word not in seen:
            assert select.select([ours], [], [], 20.0)[0], seen
            seen += os.read(ours, 1000)
        return seen

    read_until(b"Model")
    if end == "signal":
        # one that comes between the prompt and its read is noticed with the next one only
        for _ in range(10):
            process.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 2.0)[0]:
                break
    else:
        os.write(ours, b"\x04")
    error = read_until(b"nothing was written")
    assert process.wait(120) == 130
    os.close(ours)
    assert b"Traceback" not in error
    assert not list(folder.iterdir())
