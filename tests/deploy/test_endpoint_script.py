"""deploy_boto3.py against stand-ins of SageMaker: create, wait, fail, go on, delete.

Plain endpoints and their scaling run against moto. It has no inference components, so those run
against a small server here, whose requests botocore's client has validated.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

import pytest
from moto.sagemaker.models import sagemaker_backends
from moto.server import ThreadedMotoServer

from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.deploy.bundle import build_bundle, write_bundle
from lmi_bench.deploy.plan import plan_from_layout
from lmi_bench.deploy.settings import EndpointSettings, Server, Stated
from tests.docs.pages import ROOT

ROLE = "arn:aws:iam::123456789012:role/sagemaker"
COMPONENT = "InferenceComponent"


class Control(BaseHTTPRequestHandler):
    """SageMaker's control plane: a create stores, a describe answers, a delete forgets."""

    things: dict[tuple[str, str], dict]
    asked: list[str]
    fails = False
    refuses = ""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        operation = self.headers["X-Amz-Target"].rpartition(".")[2]
        self.asked.append(operation)
        verb = next(
            v for v in ("Create", "Describe", "Delete", "Register", "Deregister", "Put") if operation.startswith(v)
        )
        kind = operation.removeprefix(verb)
        key = (kind, body.get(f"{kind}Name", ""))
        status, answer = 200, {}
        if verb == "Create" and kind == self.refuses:
            status, answer = (
                400,
                {"__type": "ValidationException", "message": "Could not find model data at s3://bucket/weights/"},
            )
        elif verb == "Create":
            self.things[key] = body
            answer = {f"{kind}Arn": f"arn:aws:sagemaker:us-east-1:123456789012:{kind.lower()}/x"}
        elif verb == "Describe" and key in self.things:
            state = "Failed" if self.fails and kind == COMPONENT else "InService"
            answer = {f"{kind}Name": key[1], f"{kind}Status": state}
            if state == "Failed":
                answer["FailureReason"] = "no capacity for ml.p5.48xlarge"
        elif verb == "Delete" and key in self.things:
            del self.things[key]
        elif verb in ("Describe", "Delete"):
            status, answer = (400, {"__type": "ValidationException", "message": f'Could not find {kind} "{key[1]}".'})
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def aws(monkeypatch):
    """Credentials and an address that boto3 uses; moto answers there."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    yield sagemaker_backends["123456789012"]["us-east-1"]
    sagemaker_backends.reset()
    server.stop()


@pytest.fixture
def control(monkeypatch):
    """Credentials, and the stand-in with components at boto3's address."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    handler = type("Handler", (Control,), {"things": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    server.server_close()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a plan's files and returns a function that runs deploy_boto3.py with arguments."""

    def make(model="qwen3-8b", instance="ml.g4dn.12xlarge", server="lmi", stated=None, **endpoint):
        plan = plan_from_layout(model, instance, VLLM_0_12, stated or Stated(max_model_len=4096))
        settings = EndpointSettings("chat", ROLE, **endpoint)
        folder = tmp_path / "deployment"
        write_bundle(build_bundle(plan, Server(server), settings), folder)
        path = folder / "deploy_boto3.py"
        spec = importlib.util.spec_from_file_location("deploy_boto3", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.POLL_S = 0.01

        def run(*arguments):
            monkeypatch.setattr("sys.argv", ["deploy_boto3.py", *arguments])
            return module.main()

        return run

    return make


def test_an_endpoint_is_created_watched_kept_and_deleted(aws, script, capsys):
    run = script(max_instances=3)
    assert run("--dry-run") == 0
    assert not aws._models
    capsys.readouterr()
    assert run() == 0
    assert "InService" in capsys.readouterr().out
    assert set(aws.endpoints) == {"chat"}
    assert run() == 0
    assert "create_endpoint: exists, kept" in capsys.readouterr().out
    assert run("--delete") == 0
    assert "deregister_scalable_target" in capsys.readouterr().out
    assert not {**aws.endpoints, **aws._models, **aws.endpoint_configs}
    assert run("--delete") == 0
    assert capsys.readouterr().out.count("was not there") == 4


def test_a_half_made_endpoint_goes_on_and_a_failed_one_says_why(aws, script, capsys, monkeypatch):
    run = script("llama-3.1-8b", accept_eula=True)
    assert run() == 1
    assert "HF_TOKEN is not set" in capsys.readouterr().err
    assert not aws._models
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run() == 0
    (model,) = aws._models.values()
    assert model.primary_container["Environment"]["HF_TOKEN"] == "secret"
    assert "secret" not in capsys.readouterr().out
    (endpoint,) = aws.endpoints.values()
    endpoint.endpoint_status = "Failed"
    endpoint.failure_reason = "The primary container did not pass the ping health check."
    assert run() == 1
    said = capsys.readouterr()
    assert "create_model: exists, kept" in said.out
    assert "did not pass the ping health check" in said.err
    assert "--delete" in said.err


def test_components_are_waited_for_too(control, script, capsys):
    run = script(stated=Stated(max_model_len=2048), instance="ml.g6e.12xlarge", server="vllm")
    assert run() == 0
    assert control.asked.index("CreateInferenceComponent") > control.asked.index("CreateEndpoint")
    assert control.asked[-1] == "DescribeInferenceComponent"
    control.refuses, control.things = "Model", {}
    assert run() == 1
    assert "Could not find model data at s3://bucket/weights/" in capsys.readouterr().err
    control.refuses, control.fails = "", True
    assert run() == 1
    assert "no capacity for ml.p5.48xlarge" in capsys.readouterr().err
    assert run("--delete") == 0
    assert not control.things


def test_what_exists_with_other_settings_is_not_kept(aws, script, capsys, tmp_path):
    run = script()
    assert run() == 0
    file = tmp_path / "deployment" / "sagemaker.json"
    plan = json.loads(file.read_text())
    environment = plan[0]["parameters"]["PrimaryContainer"]["Environment"]
    variant = plan[1]["parameters"]["ProductionVariants"][0]
    for place, key, value, says in (
        (environment, "OPTION_MAX_MODEL_LEN", "2048", "create_model: Environment is another"),
        (variant, "InstanceType", "ml.g5.xlarge", "create_endpoint_config: InstanceType is another"),
    ):
        kept, place[key] = place[key], value
        file.write_text(json.dumps(plan))
        assert run() == 1
        assert re.search(says, capsys.readouterr().err)
        place[key] = kept


def test_the_template_is_a_script_that_ruff_and_strict_mypy_accept(tmp_path):
    """It lies as text in the package, where neither tool of the checks looks at it."""
    text = (resources.files("lmi_bench.deploy") / "data/deploy_boto3.py.txt").read_text("utf-8")
    compile(text, "deploy_boto3.py", "exec")
    path = tmp_path / "deploy_boto3.py"
    path.write_text(text, "utf-8")
    plain = ("--config-file=", f"--cache-dir={tmp_path / 'cache'}", "--ignore-missing-imports")
    for tool, *options in (
        ("ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")),
        ("ruff", "format", "--check", "--no-cache", "--config", str(ROOT / "pyproject.toml")),
        ("mypy", "--strict", "--python-version=3.11", *plain),
    ):
        pytest.importorskip(tool, reason=f"{tool} is one of the dev extra")
        command = [sys.executable, "-m", tool, *options, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
