"""`deploy` and `serve --serving-properties` as a person types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass

import pytest

from lmi_bench.cli.main import main
from lmi_bench.jobs.serving_file import read_serving_file
from lmi_bench.targets.profiles import find_profile
from tests.end_to_end.commands import LIMIT_S, Server, command, environment

LLAMA = ("-m", "llama-2-7b", "--instance", "ml.g5.12xlarge")


@dataclass
class Done:
    stdout: str
    stderr: str


@pytest.fixture
def lmi_bench(monkeypatch, capsys):
    """Run a command in this process, which spares the start of another."""

    def run(*args, expect=0):
        monkeypatch.setattr(sys, "argv", ["lmi-bench", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert (end.value.code or 0) == expect, said
        return Done(said.out, said.err)

    return run


def test_what_recommend_says_is_written_checked_and_packed(lmi_bench, tmp_path):
    rec, out = tmp_path / "rec.json", tmp_path / "deployment"
    lmi_bench(
        *("recommend", "-m", "llama-2-7b", "--isl", "128", "--osl", "64", "--rate", "1"),
        *("--instance", "ml.g5.2xlarge", "--json", rec),
    )
    refused = lmi_bench("deploy", "write", rec, "--out", out, expect=2)
    assert "has a licence of its own: read it, then add --accept-eula" in refused.stderr
    assert not out.exists()
    done = lmi_bench("deploy", "write", rec, "--out", out, "--accept-eula")
    assert "image 763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.38.0-lmi29" in (done.stdout)
    best = json.loads(rec.read_text())["recommended"]
    config = json.loads((out / "sagemaker.json").read_text())[1]["parameters"]
    variant = config["ProductionVariants"][0]
    assert variant["InstanceType"] == best["instance"]
    assert variant["InitialInstanceCount"] == best["instances"]
    archive = tmp_path / "model.tar.gz"
    assert "serving.properties" in lmi_bench("deploy", "package", out, "-o", archive).stdout
    checked = lmi_bench("deploy", "check", archive)
    assert int(re.search(r"option\.max_model_len\s+(\d+)\s", checked.stdout)[1]) >= 4 * 192
    again = lmi_bench("deploy", "write", rec, "--out", out, "--accept-eula", expect=2)
    assert "is not an empty folder" in again.stderr


def test_a_layout_for_least_latency_takes_one_request_at_a_time(lmi_bench, tmp_path):
    out = tmp_path / "tgi"
    lmi_bench(
        *("deploy", "write", *LLAMA, "--server", "tgi", "--goal", "latency"),
        *("--accept-eula", "--out", out, "--max-input-tokens", "256", "--max-model-len", "512"),
    )
    written = (out / "tgi.env").read_text()
    assert "MAX_CONCURRENT_REQUESTS=1\n" in written
    # published for Llama 2 7B on ml.g5.12xlarge: 17 ms a token on four devices, 33 on one
    assert "SM_NUM_GPUS=4\n" in written


def test_a_mistake_in_a_file_is_one_line_and_exit_2(lmi_bench, tmp_path):
    file = tmp_path / "serving.properties"
    file.write_text("option.rolling_batch=lmi-dist\nengine=Python\noption.max_rollin_batch_size=8\n")
    done = lmi_bench("deploy", "check", file, "--djl-version", "0.26.0", expect=2)
    assert "did you mean option.max_rolling_batch_size?" in done.stderr
    assert "engine=Python has no rolling batch lmi-dist" in done.stderr
    served = lmi_bench("serve", "--serving-properties", file, expect=2)
    assert "did you mean option.max_rolling_batch_size?" in served.stderr


def test_tables_are_printed(lmi_bench):
    backends = lmi_bench("deploy", "backends", *LLAMA, "--djl-version", "0.26.0").stdout
    assert "chosen: LMI-Distributed" in backends
    assert "option.rolling_batch=auto is lmi-dist (to 0.26)" in backends
    limits = lmi_bench("deploy", "limits", *LLAMA, "--tp", "1", "--rope-factor", "2")
    fits = re.findall(r"^ +1 +4 +[\d,]+(?: \*)? +(\d+)", limits.stdout, re.MULTILINE)
    assert [int(count) for count in fits] == [23, 11, 5, 2, 1]  # 5.9 GiB of 0.5 MiB a token
    assert "perplexity may rise with the length" in limits.stderr
    assert "SM_NUM_GPUS=4" in lmi_bench("deploy", "defaults", *LLAMA[1::2]).stdout


@pytest.fixture
def served_file(tmp_path):
    file = tmp_path / "serving.properties"
    file.write_text(
        "engine=Python\noption.model_id=demo-15m\noption.dtype=fp32\n"
        "option.tensor_parallel_degree=1\nbatch_size=2\nmax_batch_delay=5\n"
        "option.max_model_len=64\noption.output_formatter=jsonlines\n"
    )
    return file


def test_the_bundled_engine_serves_a_containers_file(lmi_bench, served_file, monkeypatch):
    """The file beats the environment, a flag beats the file; the limit of 64 tokens holds."""
    monkeypatch.setenv("OPTION_MAX_MODEL_LEN", "32")
    monkeypatch.setenv("OPTION_BLOCK_SIZE", "16")
    server = Server(
        *("--serving-properties", str(served_file), "--threads", "1", "--num-blocks", "32"),
        *("--max-batch-delay-ms", "1"),
    )
    try:
        assert "is healthy" in lmi_bench("deploy", "probe", server.url, "--timeout", "30").stdout
        statuses = []
        for count in (60, 70):
            body = {"inputs": "a b", "parameters": {"max_new_tokens": count}}
            request = urllib.request.Request(f"{server.url}/invocations", json.dumps(body).encode(), method="POST")
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    statuses.append(answer.status)
            except urllib.error.HTTPError as exc:
                statuses.append(exc.code)
    finally:
        code, stderr = server.stop()
    assert (statuses, code) == ([200, 400], 0)
    assert "batching: dynamic batches of up to 2" in stderr
    assert "option.block_size=16 from the environment (OPTION_BLOCK_SIZE)" in stderr
    assert "without effect on the bundled engine: option.output_formatter" in stderr


def test_a_model_that_loads_too_long_ends_the_server_with_one_line(served_file):
    """Building the demo model takes longer than a second's hundredth on any machine."""
    served_file.write_text("option.model_id=demo-110m\noption.max_rolling_batch_size=2\n")
    done = subprocess.run(
        command(*("serve", "--port", "0", "--serving-properties", str(served_file)), *("--model-loading-timeout", "1")),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**environment(), "HOME": str(served_file.parent), "XDG_CACHE_HOME": str(served_file.parent)},
        check=False,
    )
    assert done.returncode == 1
    assert "error: demo-110m was not loaded within 1 s (model_loading_timeout)" in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("option.model_id=s3://bucket/model/", "this command downloads nothing"),
        ("option.model_id=tiiuae/falcon-40b", "'tiiuae/falcon-40b' is neither a folder nor a demo"),
    ],
)
def test_a_model_that_cannot_be_served_is_named(lmi_bench, tmp_path, line, message):
    file = tmp_path / "serving.properties"
    file.write_text(line + "\n")
    assert message in lmi_bench("serve", "--serving-properties", file, expect=2).stderr


def test_a_container_that_never_becomes_healthy_fails_at_its_deadline(lmi_bench):
    done = lmi_bench("deploy", "probe", "http://127.0.0.1:9", "--timeout", "1", expect=1)
    assert "was not healthy within 1 s" in done.stderr
    for url in ("http://127.0.0.1:80x0", "ftp://127.0.0.1"):
        assert "is no address" in lmi_bench("deploy", "probe", url, expect=2).stderr


def test_a_copy_over_machines_comes_from_a_plan_alone(lmi_bench):
    machine = ("--model", "deepseek-v3", "--instance", "2 x ml.p5.48xlarge")
    done = lmi_bench("deploy", "write", *machine, "--platform", "kubernetes", expect=2)
    assert "a plan of recommend --hosts" in done.stderr


def test_more_devices_than_the_machine_has_are_named(lmi_bench):
    machine = ("--model", "llama-3.1-8b", "--instance", "ml.g5.xlarge", "--tp", "4")
    done = lmi_bench("deploy", "limits", *machine, expect=2)
    assert "--tp 4: ml.g5.xlarge has 1 device" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "unchanged JumpStart model; use"),
        (("--model-data", "s3://bucket/tuned/"), "your own weights"),
        (("--components",), "inference components"),
    ],
)
def test_sagemakers_own_draft_is_refused_with_what_stands_against_it(lmi_bench, flags, says):
    done = lmi_bench("deploy", "write", *LLAMA, "--draft", "sagemaker", *flags, expect=2)
    assert says in done.stderr
    assert "--draft ngram" in done.stderr


def test_sagemakers_own_draft_does_not_run_on_this_machine(lmi_bench):
    done = lmi_bench("serve", "--draft", "sagemaker", expect=2)
    assert "the bundled engine, which runs on this machine" in done.stderr


@pytest.mark.parametrize(("version", "profile"), [("0.38.0", "vLLM 0.12 to 0.19"), ("0.35.0", "vLLM 0.12 to 0.19")])
def test_a_simulated_container_has_the_profile_nearest_to_its_engine(tmp_path, version, profile):
    notes = []
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=llama-2-7b\noption.tensor_parallel_degree=1\n")
    found = read_serving_file(file, {}, simulated=True, note=notes.append, djl_version=version)
    assert find_profile(found.engine["profile"]).label == profile
    assert "answers of the LMI routes: async" in notes[0]
    plain = read_serving_file(file, {}, simulated=False, note=notes.append, djl_version=version)
    assert "profile" not in plain.engine


def test_variables_of_sagemaker_count_in_the_containers_that_read_them(tmp_path):
    """From 0.35 they replace what the file says; 0.26 does not know them."""
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=llama-2-7b\n")
    environ, notes = {"SAGEMAKER_STARTUP_TIMEOUT": "60"}, {"0.26.0": [], "0.38.0": []}
    for version, told in notes.items():
        read_serving_file(file, environ, simulated=True, note=told.append, djl_version=version)
    assert not any("SAGEMAKER_STARTUP_TIMEOUT" in note for note in notes["0.26.0"])
    assert any("SAGEMAKER_STARTUP_TIMEOUT" in note for note in notes["0.38.0"])
