"""`doctor`: real breakage of what it examines, each in one line, and never a secret."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT
from lmi_bench.jobs import doctor as job
from lmi_bench.jobs.settings.setup import DoctorSettings
from tests.docs.pages import ROOT
from tests.end_to_end.commands import command, environment
from tests.loadgen.ask.test_discover import MODELS, good_completions, playing, says

SECRETS = ("hunter2-of-the-proxy", "AKIAABCDEFGHIJKLMNOP", "secret-in-the-file", "url-password")


def cripple():
    """One core, few files: what a container may be limited to."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The findings on a machine where much is broken, what was printed, and the exit code."""
    home = tmp_path_factory.mktemp("home")
    (home / "runs").write_text("a file where a folder belongs")
    (home / "bin").mkdir()
    (home / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (home / "bin" / "nvidia-smi").chmod(0o755)
    (home / "aws").write_text(f"[default]\naws_access_key_id = {SECRETS[1]}\nregion = xx-1\n")
    with socket.create_server(("127.0.0.1", 0)) as metadata, socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
        closed.close()
        env = {
            **{key: value for key, value in environment().items() if not key.startswith("AWS_")},
            "PYTHONPATH": str(ROOT),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "PATH": str(home / "bin"),
            "AWS_CONFIG_FILE": str(home / "aws"),
            "AWS_SHARED_CREDENTIALS_FILE": str(home / "none"),
            "AWS_PROFILE": "gone",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://{}:{}".format(*metadata.getsockname()),
            "HTTPS_PROXY": f"http://me:{SECRETS[0]}@proxy:3128",
        }
        done = subprocess.run(
            command("doctor", "--json=d", f"--target=http://me:{SECRETS[3]}@127.0.0.1:{dead}"),
            capture_output=True,
            text=True,
            env=env,
            cwd=home,
            preexec_fn=cripple,
            check=False,
        )
        metadata.settimeout(0.01)
        with pytest.raises(TimeoutError):  # nobody asked the metadata service
            metadata.accept()
    findings = json.loads((home / "d").read_text())["findings"]
    return {each["check"]: each for each in findings}, done


@pytest.mark.parametrize(
    ("check", "state", "found", "mend"),
    [
        ("cores", "warn", "1 of", ""),
        ("open files", "fail", "hard limit 80: 16 concurrent streams", "1,088 or more"),
        ("C receiver", "warn", "no C compiler is installed", "Install a C compiler"),
        ("disk", "fail", "runs cannot be written (Not a directory)", "--out"),
        ("GPU", "warn", "nvidia-smi fails (CalledProcessError)", "driver"),
        ("AWS credentials", "fail", "profile gone is not in the files", "AWS_PROFILE"),
        ("AWS region", "warn", "none", "AWS_REGION"),
        ("proxies", "warn", "HTTPS_PROXY set", "list hosts to reach directly in NO_PROXY"),
        ("endpoint", "fail", "nothing answers", "address"),
    ],
)
def test_what_is_broken_is_a_line_that_says_what_to_mend(broken, check, state, found, mend):
    line = broken[0][check]
    assert line["state"] == state, line
    assert found in line["found"]
    assert mend in line["mend"]


def test_a_failure_ends_with_1_and_no_secret_or_traceback_is_shown(broken):
    findings, done = broken
    shown = done.stdout + done.stderr + json.dumps(findings)
    assert done.returncode == 1
    assert "real request of two tokens" in done.stderr
    assert not [each for each in (*SECRETS, "Traceback") if each in shown]


@pytest.mark.parametrize(
    ("files", "env", "state", "found"),
    [
        ("[default]\naws_access_key_id=A\n[profile x]\nrole_arn=r\n", {"AWS_PROFILE": "x"}, "ok", "a role"),
        ("[default]\naws_access_key_id = A\n", {}, "ok", "profile default has keys"),
        ("[default]\nsso_session = A\n", {}, "ok", "profile default has SSO"),
        ("", {}, "warn", "none in the environment"),
        ("", {"AWS_ACCESS_KEY_ID": SECRETS[1]}, "fail", "without AWS_SECRET_ACCESS_KEY"),
        (f"{SECRETS[2]}\n", {}, "warn", "cannot be read"),
    ],
)
def test_credentials_are_named_and_never_shown(monkeypatch, tmp_path, files, env, state, found):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(files)
    paths = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "none"}
    for name, value in env.items() | {(key, str(tmp_path / path)) for key, path in paths.items()}:
        monkeypatch.setenv(name, value)
    line = job.finding("AWS", job._aws_credentials)
    assert (line.state, found in line.found) == (state, True), line
    assert not [each for each in SECRETS if each in line.found]


def test_the_receiver_is_looked_for_and_not_built(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", sys.executable)  # a program that is there, as a compiler is
    assert job._receiver() == ("ok", "is built at the first sweep", "")
    assert not list(tmp_path.iterdir())


def test_an_endpoint_is_asked_what_it_serves():
    routes = {("GET", "/v1/models"): says(MODELS), ("POST", "/v1/completions"): good_completions}
    with playing(routes) as (url, asked):
        check = job._endpoint_check(DoctorSettings(api_key="k" * 20), url, SILENT)
        assert not asked
        state, found, _ = check()
    assert (state, "protocol openai, model org/model" in found) == ("ok", True)
    assert all(headers["Authorization"] == f"Bearer {'k' * 20}" for *_, headers in asked)


@pytest.mark.parametrize("url", ["nowhere", "ftp://host", "http://host:port"])
def test_what_is_no_url_is_refused_before_anything_is_examined(url):
    with pytest.raises(InputError, match=r"not an? (address|URL)"):
        job.doctor(DoctorSettings(target=url), SILENT)
