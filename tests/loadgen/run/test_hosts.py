"""The places of a `--hosts` list, and the command that ssh gets for each."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.loadgen.run.hosts import parse_hosts, ray_workers


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("gpu1", ("gpu1", "lmi-bench worker")),
        ("gpu1:~/venv/bin/lmi-bench", ("gpu1", "~/venv/bin/lmi-bench worker")),  # the shell there expands it
        ("gpu1:~ada/my venv/lmi-bench", ("gpu1", "~ada/'my venv/lmi-bench' worker")),
        ("gpu1:~;reboot/x", ("gpu1", "'~;reboot/x' worker")),
        ("[fe80::1%eth0]", ("fe80::1%eth0", "lmi-bench worker")),
        ("ada@[2001:db8::1]:/opt/lmi-bench", ("ada@2001:db8::1", "/opt/lmi-bench worker")),
    ],
)
def test_a_host_becomes_a_command_of_ssh(text, command):
    (host,) = parse_hosts(text)
    assert host.command[-3:] == ("--", *command)


@pytest.mark.parametrize("text", ["fe80::1", "local:/opt/lmi-bench", "join:/opt/lmi-bench", "gpu1:", "[gpu1"])
def test_a_place_that_would_mean_nothing_is_refused(text):
    with pytest.raises(InputError, match="write local, join, HOST or"):
        parse_hosts(text)


def _ray(monkeypatch, *nodes):
    """A stand-in for Ray with these nodes; gives the tasks and bundles that it is asked for."""
    tasks, bundles = [], []

    def placement_group(asked, strategy):
        bundles.extend(asked)
        return SimpleNamespace(wait=lambda _s: strategy == "STRICT_SPREAD")

    util = SimpleNamespace(placement_group=placement_group, get_node_ip_address=lambda: "10.0.0.5")
    ray = SimpleNamespace(
        util=util,
        init=lambda **_: None,
        nodes=lambda: nodes,
        remote=lambda **_: lambda _work: SimpleNamespace(remote=lambda *given: tasks.append(given)),
        cancel=lambda _task: None,
        shutdown=lambda: None,
    )
    placed = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, node: node)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", placed)
    monkeypatch.setenv("LMI_BENCH_SECRET", "0123456789abcdef")
    return tasks, bundles


@pytest.mark.parametrize(("listen", "dialled"), [("0.0.0.0", "10.0.0.5"), ("::", "10.0.0.5"), ("10.1.1.1", "10.1.1.1")])
def test_ray_places_a_worker_on_each_node_with_a_core_and_tells_it_an_address(monkeypatch, listen, dialled):
    """On Kubernetes the head has no core to give; to listen on all addresses is no address to dial."""
    head, gone = {"Alive": True, "Resources": {"memory": 1.0}}, {"Alive": False, "Resources": {"CPU": 8.0}}
    tasks, bundles = _ray(monkeypatch, head, gone, *[{"Alive": True, "Resources": {"CPU": 8.0}}] * 2)
    with ray_workers("auto", (listen, 7711)) as (number, _check):
        assert number == 2
    assert bundles == [{"CPU": 1}] * 2
    assert tasks == [(f"{dialled}:7711", "0123456789abcdef")] * 2


def test_a_cluster_without_a_core_is_one_line(monkeypatch):
    _ray(monkeypatch, {"Alive": True, "Resources": {}})
    with pytest.raises(InputError, match="--ray auto: none of its nodes has a core"), ray_workers("auto", ("h", 1)):
        pass
