"""Builds the Kubernetes files of a plan: Deployment and Service, KEDA's scaling, KServe's service.

The objects are in data/kubernetes.yaml; this module has their values. One pod is one copy; a copy
that spans hosts is a group of pods, a LeaderWorkerSet, whose leader serves. KEDA and KServe are
files of their own, since a cluster may lack their kinds.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmi_bench.catalog.templates import as_yaml, filled
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import GIB
from lmi_bench.deploy.images import SERVER_FACTS, Container
from lmi_bench.deploy.plan import DeploymentPlan
from lmi_bench.deploy.settings import SECRET, EndpointSettings, Server

_PORT: Final = 8000
_HOST_SHARE: Final = 0.8  # of the host's memory for pods; the node's own services use the rest
_SHM_GIB_PER_DEVICE: Final = 2
_PROBE_S: Final = 10
_COOL_DOWN_S: Final = 300
_GROUP_VERSION: Final = "leaderworkerset.x-k8s.io/v1"


def kubernetes_files(
    plan: DeploymentPlan, server: Server, pod: Container, endpoint: EndpointSettings
) -> dict[str, str]:
    """The files by name.

    endpoint  the name of every object, the time limit of a pod to become healthy, autoscaling
    """
    startup_s, most_machines = endpoint.startup_s, endpoint.max_instances
    assert endpoint.name is not None
    assert startup_s is not None
    name, facts = endpoint.name.lower(), SERVER_FACTS[server.kind]
    if not name[0].isalpha():
        raise InputError(f"--name {name}: a Service's name begins with a letter")
    copies, hosts = plan.instances * plan.copies, plan.hosts
    place = plan.weights.location
    has_kserve = server.kind == "vllm" and hosts == 1 and not place.startswith("/")
    given = shlex.join(word for word in pod.arguments if word != place)
    kserve_variables = {**pod.environment, "VLLM_ADDITIONAL_ARGS": given}
    written = {
        "kubernetes.yaml": ["deployment" if hosts == 1 else "group", "service"],
        "keda.yaml": [] if most_machines is None else ["scaled"],
        "kserve.yaml": ["kserve"] if has_kserve else [],
    }
    values = {
        "name": name,
        "copies": copies,
        "most_copies": (most_machines or 0) * plan.copies,
        "hosts": hosts,
        "leader": None if hosts == 1 else "0",
        "probe_s": _PROBE_S,
        "startup_probes": math.ceil(startup_s / _PROBE_S),
        "progress_s": startup_s + _COOL_DOWN_S,
        "cool_down_s": _COOL_DOWN_S,
        "target": f"{plan.scaling_target(endpoint.target_per_copy, most_machines):.1f}",
        "running_and_waiting": " + ".join(  # Prometheus' query over all replicas
            f'sum({facts[gauge]}{{pod=~"{name}-.*"}})' for gauge in ("running", "waiting")
        ),
        "prometheus": server.prometheus,
        "scaled_version": None if hosts == 1 else _GROUP_VERSION,
        "scaled_kind": None if hosts == 1 else "LeaderWorkerSet",
        **_pod_values(plan, server.kind, pod),
        "weights": place,  # which KServe's own template puts before the arguments
        "weights_uri": place if "://" in place else f"hf://{place}",
        "kserve_environment": _variables(kserve_variables, pod.secrets),
    }
    return {
        file: as_yaml(*filled("deploy/kubernetes.yaml", names, values).values())
        for file, names in written.items()
        if names
    }


def _pod_values(plan: DeploymentPlan, server: str, pod: Container) -> dict[str, Any]:
    """Command, machine and resources of a pod; the copies on a host share its memory and cores."""
    instance, count = plan.setup.instance, plan.setup.devices // plan.hosts
    share = _HOST_SHARE * count / instance.num_accelerators  # of all hosts together
    if instance.accelerator.vendor != "nvidia":
        raise InputError(f"{instance.instance_type}: the manifests ask for NVIDIA GPUs alone")
    joins = [*pod.arguments]
    if plan.hosts > 1:
        if server == "vllm" and plan.engine.dp_attention:
            raise InputError(
                f"DP attention over {plan.hosts} hosts: vLLM takes a rank offset for each host, "
                "which a manifest cannot compute; use --server sglang, or recommend without "
                "--dp-attention"
            )
        joins += SERVER_FACTS[server]["join_group"].split()  # Kubernetes sets the variables
    devices = {"nvidia.com/gpu": count}
    return {
        "image": pod.image,
        "command": [*pod.command],
        "arguments": [*joins, "--host", "0.0.0.0", "--port", str(_PORT)],  # noqa: S104 - a pod's
        "follower_arguments": [*joins, *SERVER_FACTS[server]["follow_leader"].split()],
        "port": _PORT,
        "port_text": str(_PORT),
        "environment": _variables(pod.environment, pod.secrets),
        "instance_type": instance.instance_type.rpartition(" x ")[2].removeprefix("ml."),
        "devices": devices,
        "requests": {
            **devices,
            "cpu": max(1, math.floor(instance.vcpus * share)),
            "memory": f"{max(1, math.floor(instance.host_memory_bytes * share / GIB))}Gi",
        },
        "shared_memory": f"{_SHM_GIB_PER_DEVICE * count}Gi",
    }


def _variables(environment: Mapping[str, str], secrets: Sequence[str]) -> list[dict[str, Any]] | None:
    """The variables of a container; None without any."""
    plain = [{"name": key, "value": value} for key, value in environment.items()]
    kept = [{"name": key, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key}}} for key in secrets]
    return [*plain, *kept] or None
