"""A load generator on Kubernetes: valid objects that find each other, and no secret in the file."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

from lmi_bench.core.errors import InputError
from lmi_bench.deploy.loadgen import Loadgen
from tests.deploy.test_kubernetes import SCHEMAS

SWEEP = ("http://vllm:8000", "--rate", "100,200")


def _objects():
    found = {}
    for each in yaml.safe_load_all(Loadgen(SWEEP, "registry/lmi-bench:1", 3, "load").manifest()):
        schema = {**SCHEMAS["kinds"][each["kind"]], "$defs": SCHEMAS["$defs"]}
        jsonschema.Draft202012Validator(schema).validate(each)
        found[each["kind"], each["metadata"]["name"]] = each
    return found


def _container(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def test_the_objects_are_valid_and_the_workers_find_the_sweep():
    found = _objects()
    assert list(found) == [
        ("Service", "load"),
        ("PersistentVolumeClaim", "load"),
        ("Job", "load"),
        ("Job", "load-workers"),
    ]
    service, sweep = found["Service", "load"]["spec"], found["Job", "load"]
    assert service["clusterIP"] == "None"
    labels = sweep["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    workers = found["Job", "load-workers"]["spec"]
    assert workers["completionMode"] == "Indexed"
    assert (workers["completions"], workers["parallelism"]) == (3, 3)
    (port,) = service["ports"]
    command = _container(found["Job", "load-workers"])["command"]
    assert command == ["lmi-bench", "worker", "--connect", f"load:{port['port']}"]
    command = _container(sweep)["command"]
    assert command[:5] == ["lmi-bench", "sweep", *SWEEP]
    assert command[5:9] == ["--hosts", "join*3", "--listen", f"[::]:{port['port']}"]
    # a pod of the workers must not be taken for the sweep's
    assert not service["selector"].items() <= workers["template"]["metadata"]["labels"].items()


def test_secrets_come_from_the_cluster_alone():
    for job in ("load", "load-workers"):
        secrets = _container(_objects()["Job", job])["env"]
        assert [each["name"] for each in secrets] == ["LMI_BENCH_SECRET", "LMI_BENCH_API_KEY"]
        for each in secrets:
            assert each["valueFrom"]["secretKeyRef"]["name"] == "lmi-bench-secrets"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--hosts=a,b", "--hosts: leave it out. The file states where the workers"),
        ("--out", "--out: leave it out"),
        ("--ray=auto", "--ray: leave it out"),
        ("--against=http://b:8000", "--against: leave it out. .* and holds one sweep"),
        ("--api-key=sk-1", "--api-key: leave it out. .* key is not written into files"),
        ("-H", "-H: leave it out"),
        ("-HAuthorization: Bearer sk-123456789", "-H: leave it out"),
        ("-oruns/x", "-o: leave it out"),
        ("http://user:pass@vllm:8000", "http://vllm:8000: leave it out"),
    ],
)
def test_what_the_file_states_itself_and_secrets_are_refused(argument, said):
    with pytest.raises(InputError, match=said):
        Loadgen((*SWEEP, argument), "image")


@pytest.mark.parametrize("name", ["My Load", "1st", "a.b", "-a", "a-", "", "x" * 41])
def test_a_name_that_kubernetes_refuses_is_refused(name):
    with pytest.raises(InputError, match=r"use a to z, 0 to 9 and hyphens"):
        Loadgen(SWEEP, "image", name=name)
