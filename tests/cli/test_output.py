"""`--output table|plain|json` and `--quiet`: what goes to stdout and stderr, and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from lmi_bench.cli.console import stdout
from lmi_bench.cli.main import main
from tests.end_to_end.commands import command, environment

MACHINE = ("--model", "llama-2-7b", "--instance", "ml.g5.2xlarge")
PREDICT = ("predict", *MACHINE, "--concurrency", "1,8", "--isl", "128", "--osl", "64")
DAY = ("plan-day", "--capacity", "2", "--peak", "9", "--start-up", "300")
SWEEP = (
    *("sweep", "--target", "sim:ml.g5.2xlarge", "--model", "llama-2-7b", "--isl", "64"),
    *("--osl", "16", "--concurrency", "1,2", "--requests-per-level", "4"),
)


@dataclass
class Done:
    stdout: str
    stderr: str
    code: int


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr(sys, "argv", ["lmi-bench", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return Done(said.out, said.err, end.value.code or 0)

    return call


@pytest.mark.parametrize("args", [PREDICT, DAY])
def test_json_is_one_document_and_the_same_as_the_file(run, tmp_path, args):
    file = tmp_path / "result.json"
    done = run(*args, "--json", file, "--output", "json")
    assert done.code == 0
    assert json.loads(done.stdout) == json.loads(file.read_text())


@pytest.mark.parametrize(
    "args", [("deploy", "limits", *MACHINE), ("deploy", "options"), ("workload", "from", "log.csv", "-o", "w.yaml")]
)
def test_an_answer_without_a_file_of_its_own_is_its_tables_and_sentences(run, tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    rows = [f"2026-11-22T10:00:{second:02},100,20" for second in range(40)]
    log = "\n".join(["timestamp,prompt_tokens,completion_tokens", *rows])
    (tmp_path / "log.csv").write_text(log)
    document = json.loads(run(*args, "--output", "json").stdout)
    assert document["tables"][0]["rows"]
    assert all(isinstance(line, str) for line in document["text"])


def test_plain_tables_have_all_columns_between_tabs_and_nothing_else(run):
    done = run("deploy", "limits", *MACHINE, "--output", "plain")
    tables = json.loads(run("deploy", "limits", *MACHINE, "--output", "json").stdout)["tables"]
    lines = done.stdout.splitlines()
    columns = list(tables[0]["rows"][0])
    start = lines.index("\t".join(columns))
    body = lines[start + 1 : start + 1 + len(tables[0]["rows"])]
    assert [line.split("\t") for line in body] == [
        ["" if value is None else str(value) for value in row.values()] for row in tables[0]["rows"]
    ]
    assert not re.search(r"[─│╭\x1b]", done.stdout)


def test_quiet_leaves_the_answer_and_the_warnings(run):
    usual, quiet = run(*PREDICT), run(*PREDICT, "--quiet")
    assert "--profile names another" in usual.stderr
    assert "--profile names another" not in quiet.stderr
    assert "warning:" in quiet.stderr
    assert quiet.stdout == usual.stdout


def test_a_sweep_and_a_gate_that_misses_are_documents_with_their_exit_code(run, tmp_path):
    folder = tmp_path / "run"
    swept = json.loads(run(*SWEEP, "--out", folder, "--output", "json").stdout)
    written = [json.loads(line) for line in (folder / "levels.jsonl").read_text().splitlines()]
    assert swept["run"] == str(folder)
    assert [level["level"] for level in swept["levels"]] == [level["level"] for level in written]
    assert len(swept["knees"]) == 4
    missed = run("gate", folder, "--slo", "ttft_mean<=1ms", "--output", "json")
    assert missed.code == json.loads(missed.stdout)["exit_code"] == 99
    assert {check["outcome"] for check in json.loads(missed.stdout)["checks"]} == {"missed"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*PREDICT, "--tp", "3", "--output", "json"), "error: "),
        ((*PREDICT, "--output", "xml"), "'xml' is not one of 'table'"),
        (("serve", "--output", "json"), "No such option"),
    ],
)
def test_an_error_leaves_no_document(run, args, message):
    done = run(*args)
    assert (done.code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


def in_terminal(*args, **variables):
    """What a terminal of 80 columns gets."""
    inside, outside = pty.openpty()
    started = subprocess.Popen(command(*args), stdout=outside, stderr=outside, env=environment() | variables)
    os.close(outside)
    said = b""
    while True:
        try:
            part = os.read(inside, 4096)
        except OSError:  # the program has ended
            break
        if not part:
            break
        said += part
    os.close(inside)
    assert started.wait() == 0
    return said.decode()


def test_colours_are_off_where_they_are_not_wanted():
    """A warning is yellow; the machine's kind has never been measured, so there is one."""
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    args = ("predict", *MACHINE, "--concurrency", "1", "--isl", "8", "--osl", "2")
    variables = {"TERM": "xterm-256color", "COLUMNS": "80"}
    assert colour.search(in_terminal(*args, NO_COLOR="", **variables))
    assert not colour.search(in_terminal(*args, NO_COLOR="1", **variables))
    assert "\x1b" not in in_terminal(*args, "--output", "plain", "--quiet", TERM="dumb")


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (
            ("recommend", "--model", "nosuch", "--slo", "ttft_p90<=2", "--instance", "ml.g5.x"),
            ("4 mistakes", "--input-tokens", "'nosuch'", "'ml.g5.x'", "Write ttft_p90<=2s or"),
        ),
        (("predict",), ("--model, --instance: missing",)),
        (("verify",), ("REC.json, --target: missing",)),
        (("predict", "--model", "nosuch", "--instance", "ml.nope", "--slo=x"), ("No such option",)),
        (
            ("compare-accelerators", "--model", "no-such-model", "--isl", "0"),
            ("2 mistakes", "--input-tokens", "'no-such-model'"),
        ),
        (("recommend", "--lora", "8"), ("does not plan LoRA adapters", "sweep --adapters")),
    ],
)
def test_all_that_is_wrong_is_said_at_once(run, args, lines):
    done = run(*args)
    assert done.code == 2
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert all(line in said for line in lines), done.stderr


@pytest.mark.parametrize("place", ["x" * 300, "pyproject.toml/inside"])
@pytest.mark.parametrize(
    "args", [("report",), ("calibrate",), ("deploy", "check"), ("predict", *PREDICT[1:], "--json")]
)
def test_a_name_that_no_file_can_have_is_bad_input(run, args, place):
    done = run(*args, place)
    assert done.code == 2
    assert "fault of lmi-bench" not in done.stderr
    assert place[:20] in done.stderr


@pytest.mark.parametrize("form", ["table", "plain", "json"])
@pytest.mark.parametrize("closed", [("stdout",), ("stdout", "stderr"), ("stderr",)])
def test_a_reader_that_ends_early_costs_no_file(form, closed, tmp_path):
    """As `lmi-bench predict ... --json FILE | head -1`, with `2>&1` before the pipe, and with
    the notes alone in it, where the answer still comes."""
    file = tmp_path / "answer.json"
    arguments = [*PREDICT, "--json", str(file), "--output", form]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | dict.fromkeys(closed, pipe)
        done = subprocess.run(command(*arguments), env=environment(), text=True, check=False, **streams)
    assert (done.returncode, "Broken pipe" in (done.stderr or "")) == (0, False)
    assert json.loads(file.read_text())
    assert done.stdout is None or "ms" in done.stdout


MATRIX = """
targets:
  - {name: simulated, target: "sim:ml.g5.2xlarge", model: qwen3-8b}
  - {name: nobody, target: "http://127.0.0.1:9"}
payloads:
  - {name: "15 in, 500 out", workload: {input_tokens: 15, output_tokens: 500}}
defaults: {load: {concurrency: [1, 4, 32]}, slo: ["ttft_p90<=1s"]}
"""


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_matrix_is_read_in_a_narrow_terminal(run, tmp_path, monkeypatch, width):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stdout(), "width", width)
    (tmp_path / "m.yaml").write_text(MATRIX)
    said = run("sweep", "--matrix", "m.yaml", "--out", "cells").stdout.partition("\nMatrix\n")[2]
    levels = (tmp_path / "cells/simulated--15-in-500-out/levels.jsonl").read_text().splitlines()
    best = max(json.loads(line)["throughput_tokens_per_s"] for line in levels)
    simulated, nobody = (line.split() for line in said.splitlines() if "500 out  " in line)
    assert simulated[:5] == ["simulated", "15", "in,", "500", "out"]
    assert f"{best:,.0f}" in simulated
    assert (simulated[-1], nobody[0], nobody[-1]) == ("finished", "nobody", "failed")
    assert "15 in, 500 out on nobody failed: nothing answers at http://127.0.0.1:9: " in said
    assert "…" not in said


@pytest.mark.parametrize("table", ["models", "instances", "prices", "profiles", "images"])
def test_the_catalog_keeps_its_sources_in_a_narrow_terminal(run, monkeypatch, table):
    monkeypatch.setattr(stdout(), "width", 80)
    rows, _, notes = run("catalog", table).stdout.partition("\n[1] ")
    count = int(rows.split()[1])
    assert len(re.findall(r" \[\d+\] *$", rows, re.MULTILINE)) == count
    assert notes
    if table == "prices":
        known = [line.split() for line in rows.splitlines() if " [" in line]
        assert {platform for _, platform, *_ in known} == {"ec2", "sagemaker"}
        assert all(len(price.partition(".")[2]) <= 4 for _, _, price, *_ in known)
