"""The commands of the documents are accepted; those of the tutorials do what is shown."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from moto.sagemaker.models import FakeEndpointConfig, sagemaker_backends
from moto.server import ThreadedMotoServer

from lmi_bench.cli import console
from lmi_bench.cli.main import app, main
from lmi_bench.core.slo import join_goodput
from tests.deploy.test_kubernetes import objects
from tests.docs.pages import ROOT, command_lines, steps, titled_files
from tests.end_to_end.control_plane import control_plane
from tests.golden.scenarios import SCENARIOS
from tests.loadgen.aws.runtime_server import dummy_credentials, runtime_server

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
URL = "http://localhost:8000"
OTHERS = ("pip", "vllm", "export")  # commands that a page shows and that are not ours to run
COLUMNS = 120
NUMBER = re.compile(r"-?\d[\d,.]*|n/a|(?:in)?valid|faster|slower|no difference|unknown")


COMMANDS = [
    pytest.param(line, id=f"{page.stem}: {line}") for page in PAGES for line in command_lines(page.read_text("utf-8"))
]
ROOT_COMMAND = typer.main.get_command(app)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_a_page_is_accepted(line):
    """Its options exist and take what is given; nothing is run."""
    command, name, words = ROOT_COMMAND, "", join_goodput(shlex.split(line)[1:])
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    assert command.make_context(name, words).params


@pytest.fixture(scope="module")
def server():
    """Stands for what the tutorials start, or expect to be there."""
    with runtime_server(step_s=0.0005, model="demo-15m", max_model_len=2048) as url:
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all tutorials are followed, so that a command of two of them runs once."""
    path = tmp_path_factory.mktemp("tutorials")
    (path / "scenarios").symlink_to(ROOT / "scenarios")
    return path


@pytest.fixture
def environment(server, folder, monkeypatch):
    """A terminal of 120 columns in that folder; AWS is the server here."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(console.stdout(), "width", COLUMNS)
    dummy_credentials(monkeypatch, folder)
    with control_plane(lambda _: 1, model="demo-15m") as control:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", control)
        monkeypatch.setenv("AWS_ENDPOINT_URL_APPLICATION_AUTO_SCALING", control)
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", server)
        yield


@functools.cache
def run(*words):
    """What a command prints, and its exit code."""
    said, code = io.StringIO(), 0
    sys.argv = list(words)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    return said.getvalue(), code


def quicker(words):
    """The words, but a sweep sends at 40 req/s what its page sends at 2: a test does not wait."""
    words = list(words)
    if words[1] == "sweep" and "--rate" in words:
        words[words.index("--rate") + 1] = "40"
    return words


def script(words):
    """What a written Python script prints when it is run, and its exit code."""
    said, code = io.StringIO(), 0
    sys.argv = words[1:]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(words[1], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
    return said.getvalue(), code


def kubectl(words):
    """The cluster: it takes files whose objects are valid by their kinds' schemas."""
    files = {name: Path(name).read_text("utf-8") for name in words if name.endswith(".yaml")}
    assert not files or objects(SimpleNamespace(files=files))
    return "", 0


STAND_INS = {"python": script, "kubectl": kubectl}


def compared(line, *, varies):
    """A line as it is compared: without padding, and without figures that vary."""
    if varies:
        line = NUMBER.sub("#", re.sub(r"^( +(?:knee|most|SLOs)):.*", r"\1", line))
    return re.sub(r"\s+|─+", " ", line).strip()


def differences(step, said):
    """The lines that a page shows and the command did not print, with what is nearest to each."""
    printed = [line.rstrip() for line in said.splitlines()]
    found = [compared(line, varies=step.varies) for line in printed]
    place, differing = 0, {}
    for line in step.shown:
        wanted = compared(line, varies=step.varies)
        if wanted in found[place:]:
            place = found.index(wanted, place) + 1
        elif wanted not in ("", "..."):
            alike = [each for each in printed[place:] if each.split()[:1] == line.split()[:1]]
            near = difflib.get_close_matches(line, alike or printed[place:], n=1, cutoff=0.3)
            differing[line] = near[0] if near else ""
    return differing


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("page", [ROOT / "README.md", *TUTORIALS], ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_shows(page, server, folder):
    follow(page, server, folder)


@pytest.mark.usefixtures("environment")
def test_the_deployment_guide_creates_and_removes_what_it_says(server, folder, monkeypatch):
    """SageMaker and Auto Scaling are moto, whose list of machines ends in 2021."""
    monkeypatch.setattr(FakeEndpointConfig, "validate_instance_type", lambda *_: None)
    aws = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    aws.start()
    for service in ("SAGEMAKER", "APPLICATION_AUTO_SCALING"):
        host, port = aws.get_host_and_port()
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", f"http://{host}:{port}")
    try:
        follow(ROOT / "docs/deployment.md", server, folder)
        assert not sagemaker_backends["123456789012"]["us-east-1"].endpoints
    finally:
        aws.stop()


def follow(page, server, folder):
    """Lines that are changed on purpose are written anew with LMI_BENCH_GOLDEN=write."""
    text, code, busy, differing = page.read_text("utf-8"), 0, False, {}
    files = {"gateway.jsonl": SCENARIOS[-1].files["log.jsonl"]} | titled_files(text)
    for name, content in files.items():
        (folder / name).write_text(content, "utf-8")
    for step in steps(text):
        if step.line == "echo $?":
            said = f"{code}"
        elif step.line.endswith("&") or step.words[0] in OTHERS:
            continue
        elif step.words[0] in STAND_INS:
            said, code = STAND_INS[step.words[0]](step.words)
            assert code == 0, f"{step.line}\n{said}"
        else:
            said, code = run(*quicker(word.replace(URL, server) for word in step.words))
            busy |= step.varies and re.search("is invalid: client|it runs again", said) is not None
            nothing_valid = busy and re.search("no valid level in common|not measured", said)
            assert code in (0, 99) or nothing_valid, f"{step.line}\n{said}"
        if not (step.varies and busy):  # then this machine measured something else
            differing |= differences(step, said.replace(server, URL))
    if os.environ.get("LMI_BENCH_GOLDEN") == "write":
        for shown, printed in differing.items():
            text = text.replace(f"{shown}\n", f"{printed}\n")
        page.write_text(text, "utf-8")
    else:
        assert differing == {}, "on purpose? LMI_BENCH_GOLDEN=write python -m pytest tests/docs"
