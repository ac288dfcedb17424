"""Builds the Kubernetes files of a plan: Deployment and Service, KEDA's scaling, KServe's service.

One pod is one copy; a copy that spans hosts is a group of pods, a LeaderWorkerSet, whose leader
serves. KEDA and KServe are files of their own, since a cluster may lack their kinds.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import yaml

from lmi_bench.core.errors import InputError
from lmi_bench.core.units import GIB
from lmi_bench.deploy.plan import DeploymentPlan
from lmi_bench.deploy.sagemaker import PlainDumper
from lmi_bench.deploy.settings import PROMETHEUS

_PORT: Final = 8000
_HOST_SHARE: Final = 0.8  # of the host's memory for pods; the node's own services use the rest
_SHM_GIB_PER_DEVICE: Final = 2
_PROBE_S: Final = 10
_DRAIN_S: Final = 120
_COOL_DOWN_S: Final = 300
SECRET: Final = "lmi-bench-secrets"  # noqa: S105 - the name of a Secret
_WAITING: Final = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
}
"""Gauges of requests in a replica and in its queue."""
_LEADER: Final = "$(LWS_LEADER_ADDRESS)"  # this and the others are set in each pod of a group
_OF_A_GROUP: Final = ("--nnodes", "$(LWS_GROUP_SIZE)", "--node-rank", "$(LWS_WORKER_INDEX)")
_JOIN: Final = {
    "vllm": (*_OF_A_GROUP, "--master-addr", _LEADER, "--distributed-executor-backend", "mp"),
    "sglang": (*_OF_A_GROUP, "--dist-init-addr", f"{_LEADER}:20000"),
}
_FOLLOW: Final = {"vllm": ("--headless",), "sglang": ()}
_GROUP_KIND: Final = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}


@dataclass(frozen=True, slots=True)
class PodImage:
    """Image, command and arguments of a pod's container.

    environment  variables; secrets: those whose values a Secret of the cluster has
    arguments    of the server, without host and port
    """

    server: str
    image: str
    command: Sequence[str]
    arguments: Sequence[str]
    environment: Mapping[str, str]
    secrets: Sequence[str] = ()


def kubernetes_files(
    plan: DeploymentPlan,
    pod: PodImage,
    *,
    name: str,
    startup_s: int,
    most_machines: int | None = None,
    target_per_copy: float = 1.0,
    prometheus: str = PROMETHEUS,
) -> dict[str, str]:
    """The files by name.

    name             of every object
    startup_s        time limit of a pod to become healthy
    most_machines    of autoscaling; None: no autoscaling
    target_per_copy  concurrent requests of a copy at which one more is started
    prometheus       address that has the server's metrics
    """
    copies = plan.instances * plan.copies
    make = _deployment if plan.hosts == 1 else _group
    files = {"kubernetes.yaml": _documents(make(plan, pod, name, startup_s), _service(plan, name))}
    if most_machines is not None:
        scaled = _scaled(name, pod, copies, most_machines * plan.copies, target_per_copy)
        scaled["spec"]["triggers"][0]["metadata"]["serverAddress"] = prometheus
        if plan.hosts > 1:
            scaled["spec"]["scaleTargetRef"] |= _GROUP_KIND
        files["keda.yaml"] = _documents(scaled)
    if pod.server == "vllm" and plan.hosts == 1 and not plan.weights.location.startswith("/"):
        files["kserve.yaml"] = _documents(_kserve(plan, pod, name, copies))
    return files


def _deployment(plan: DeploymentPlan, pod: PodImage, name: str, startup_s: int) -> dict[str, Any]:
    labels = _labels(name)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": plan.instances * plan.copies,
            "selector": {"matchLabels": labels},
            # spare accelerators for a surge are rare
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": startup_s + _COOL_DOWN_S,
            "template": _serving_pod(plan, pod, name, startup_s),
        },
    }


def _group(plan: DeploymentPlan, pod: PodImage, name: str, startup_s: int) -> dict[str, Any]:
    """A LeaderWorkerSet: a pod on each host of a copy, all restarted when one is."""
    if pod.server == "vllm" and plan.engine.dp_attention:
        raise InputError(
            f"DP attention over {plan.hosts} hosts: vLLM takes a rank offset for each host, which "
            "a manifest cannot compute; use --server sglang, or recommend without --dp-attention"
        )
    joins = replace(pod, arguments=[*pod.arguments, *_JOIN[pod.server]])
    follows = {"command": [*pod.command], "args": [*joins.arguments, *_FOLLOW[pod.server]]}
    return _GROUP_KIND | {
        "metadata": {"name": name, "labels": _labels(name)},
        "spec": {
            "replicas": plan.instances * plan.copies,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "leaderWorkerTemplate": {
                "size": plan.hosts,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _serving_pod(plan, joins, name, startup_s),
                "workerTemplate": _pod(plan, name, _container(plan, pod) | follows),
            },
        },
    }


def _serving_pod(plan: DeploymentPlan, pod: PodImage, name: str, startup_s: int) -> dict[str, Any]:
    """The pod that answers requests, with its probes."""
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_S}
    container = _container(plan, pod) | {
        "command": [*pod.command],
        "args": [*pod.arguments, "--host", "0.0.0.0", "--port", str(_PORT)],  # noqa: S104 - a pod's
        "ports": [{"name": "http", "containerPort": _PORT}],
        "startupProbe": health | {"failureThreshold": math.ceil(startup_s / _PROBE_S)},
        "readinessProbe": health | {"timeoutSeconds": 5},
        "livenessProbe": health | {"timeoutSeconds": 10, "failureThreshold": 6},
    }
    made = _pod(plan, name, container)
    made["metadata"]["annotations"] = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(_PORT),
        "prometheus.io/path": "/metrics",
    }
    return made


def _pod(plan: DeploymentPlan, name: str, container: dict[str, Any]) -> dict[str, Any]:
    devices = plan.setup.devices // plan.hosts
    shm = {"medium": "Memory", "sizeLimit": f"{_SHM_GIB_PER_DEVICE * devices}Gi"}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - in the pod
    return {
        "metadata": {"labels": _labels(name)},
        "spec": {
            "nodeSelector": _node(plan),
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "terminationGracePeriodSeconds": _DRAIN_S,
            "containers": [container | {"volumeMounts": mounts}],
            "volumes": [{"name": "shm", "emptyDir": shm}],
        },
    }


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name}


def _container(plan: DeploymentPlan, pod: PodImage) -> dict[str, Any]:
    """Image, variables and resources of a pod; the copies on a host share its memory and cores."""
    instance, count = plan.setup.instance, plan.setup.devices // plan.hosts
    share = _HOST_SHARE * count / instance.num_accelerators  # of all hosts together
    devices: dict[str, Any] = {"nvidia.com/gpu": count}
    requests: dict[str, Any] = {
        **devices,
        "cpu": max(1, math.floor(instance.vcpus * share)),
        "memory": f"{max(1, math.floor(instance.host_memory_bytes * share / GIB))}Gi",
    }
    secret = {"name": SECRET}
    variables: list[dict[str, Any]] = [
        {"name": key, "value": value} for key, value in pod.environment.items()
    ]
    variables += [
        {"name": key, "valueFrom": {"secretKeyRef": secret | {"key": key}}} for key in pod.secrets
    ]
    found: dict[str, Any] = {
        "name": "main",
        "image": pod.image,
        "env": variables,
        "resources": {"requests": requests, "limits": devices},
    }
    return {key: value for key, value in found.items() if value}


def _node(plan: DeploymentPlan) -> dict[str, str]:
    machine = plan.setup.instance.instance_type.rpartition(" x ")[2]
    return {"node.kubernetes.io/instance-type": machine.removeprefix("ml.")}


def _service(plan: DeploymentPlan, name: str) -> dict[str, Any]:
    labels = _labels(name)
    leader = {} if plan.hosts == 1 else {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": labels | leader,
            "ports": [{"name": "http", "port": _PORT, "targetPort": "http"}],
        },
    }


def _scaled(name: str, pod: PodImage, least: int, most: int, target: float) -> dict[str, Any]:
    """KEDA's ScaledObject: as many copies as keep running and waiting requests at the target."""
    pods = f'{{pod=~"{name}-.*"}}'
    query = " + ".join(f"sum({gauge}{pods})" for gauge in _WAITING[pod.server])
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"name": name},
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "cooldownPeriod": _COOL_DOWN_S,
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {"query": query, "threshold": f"{target:.1f}"},
                }
            ],
        },
    }


def _kserve(plan: DeploymentPlan, pod: PodImage, name: str, copies: int) -> dict[str, Any]:
    """KServe's LLMInferenceService; its own template starts vLLM and adds these arguments."""
    place = plan.weights.location
    given = [*pod.arguments]
    given.remove(place)
    variables = {**pod.environment, "VLLM_ADDITIONAL_ARGS": shlex.join(given)}
    own = PodImage(pod.server, pod.image, (), (), variables, pod.secrets)
    return {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": place if "://" in place else f"hf://{place}", "name": place},
            "replicas": copies,
            "router": {"route": {}, "gateway": {}, "scheduler": {}},
            "template": {"nodeSelector": _node(plan), "containers": [_container(plan, own)]},
        },
    }


def _documents(*objects: Mapping[str, Any]) -> str:
    return yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False, width=100)
