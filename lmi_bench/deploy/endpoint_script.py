"""Creates, watches and deletes the SageMaker endpoint of sagemaker.json; it lies beside that file.

    python deploy_boto3.py             create what is missing, wait, print the outcome
    python deploy_boto3.py --dry-run   print the requests; nothing is sent
    python deploy_boto3.py --delete    delete all of it

A second run goes on where the first ended. Running it starts billing, and needs AWS credentials.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

REGION = "us-east-1"
POLL_S = 15
SCALING = ("register_scalable_target", "put_scaling_policy")
NAMES = {
    "create_model": ("ModelName",),
    "create_endpoint_config": ("EndpointConfigName",),
    "create_endpoint": ("EndpointName",),
    "create_inference_component": ("InferenceComponentName",),
    "register_scalable_target": ("ServiceNamespace", "ResourceId", "ScalableDimension"),
}
"""Operations, and the parameters that name what they create."""
STATUS = {
    "create_endpoint": "EndpointStatus",
    "create_inference_component": "InferenceComponentStatus",
}
MISSING = ("could not find", "does not exist", "not found", "no scalable target")


class DeploymentError(Exception):
    """The outcome is not what was asked for; the message says why."""


def client_of(operation: str) -> Any:
    """The boto3 client of an operation."""
    service = "application-autoscaling" if operation in SCALING else "sagemaker"
    return boto3.client(service, region_name=REGION)


def call(operation: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The service's answer; None if what is to be described or deleted does not exist."""
    scaled = "scal" in operation
    try:
        client = client_of(SCALING[0] if scaled else operation)
        answer: dict[str, Any] = getattr(client, operation)(**parameters)
    except ClientError as exc:
        error = exc.response.get("Error", {})
        text = error.get("Message", "")
        absent = error.get("Code") in ("ObjectNotFoundException", "ResourceNotFound")
        absent = absent or any(words in text.lower() for words in MISSING)
        if absent and operation.startswith(("describe", "delete", "deregister")):
            return None
        raise DeploymentError(f"{operation}: {error.get('Code')}: {text}") from exc
    except BotoCoreError as exc:
        raise DeploymentError(f"{operation}: {exc}") from exc
    return answer


def names_of(operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters that name what an operation creates."""
    return {name: parameters[name] for name in NAMES[operation]}


def found(operation: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The description of what an operation creates; None if it is not there."""
    return call(operation.replace("create", "describe"), names_of(operation, parameters))


def other_value(wanted: Any, there: Any, place: str = "") -> str:
    """The first parameter whose value differs from what is described; empty if there is none."""
    if isinstance(wanted, list) and isinstance(there, list):
        wanted, there = dict(enumerate(wanted)), dict(enumerate(there))
    if not (isinstance(wanted, dict) and isinstance(there, dict)) or place == "Environment":
        return "" if there is None or wanted == there else place
    pairs = ((str(key), wanted[key], there[key]) for key in wanted if key in there)
    return next(filter(None, (other_value(w, t, p) for p, w, t in pairs)), "")


def with_secrets(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the secrets of this environment."""
    variables = parameters.get("PrimaryContainer", {}).get("Environment", {})
    for name in [name for name, value in variables.items() if value == "${" + name + "}"]:
        if name not in os.environ:
            raise DeploymentError(f"{name} is not set: export it, it is part of no file")
        variables[name] = os.environ[name]
    return parameters


def wait(operation: str, parameters: dict[str, Any]) -> None:
    """Wait until the endpoint or component serves; DeploymentError has the service's reason."""
    start_s, last = time.monotonic(), ""
    while True:
        answer = found(operation, parameters) or {}
        status = answer.get(STATUS[operation], "gone")
        if status != last:
            print(f"  {time.monotonic() - start_s:5.0f} s  {status}", flush=True)
            last = status
        if status == "InService":
            return
        if status in ("Failed", "OutOfService", "UpdateRollbackFailed", "gone"):
            raise DeploymentError(
                f"{' '.join(names_of(operation, parameters).values())} is {status}: "
                f"{answer.get('FailureReason', 'no reason given')}\n"
                "it may still cost: --delete removes it; /aws/sagemaker in CloudWatch has its log"
            )
        time.sleep(POLL_S)


def create(requests: list[dict[str, Any]]) -> None:
    """Create what is missing, in order, and wait for what takes time."""
    plain = [(request["operation"], request["parameters"]) for request in requests]
    sent = [(name, with_secrets(parameters)) for name, parameters in plain]
    for operation, parameters in sent:
        if operation in SCALING:
            print(operation)
            call(operation, parameters)
            continue
        there = found(operation, parameters)
        if other := other_value(parameters, there):
            raise DeploymentError(
                f"{operation}: {other} is another where it exists: --delete first"
            )
        print(operation if there is None else f"{operation}: exists, kept")
        if there is None:
            call(operation, parameters)
        if operation in STATUS:
            wait(operation, parameters)


def delete(requests: list[dict[str, Any]]) -> None:
    """Delete what the requests created, the last first; what is not there is left out."""
    for request in reversed(requests):
        operation, parameters = request["operation"], request["parameters"]
        if operation not in NAMES:
            continue  # a policy goes with its target
        verb = "deregister" if operation in SCALING else "delete"
        deletion = operation.replace("register", verb).replace("create", verb)
        answer = call(deletion, names_of(operation, parameters))
        print(f"{deletion}{': was not there' if answer is None else ''}")
        while operation in STATUS and found(operation, parameters) is not None:
            time.sleep(POLL_S)


def main() -> int:
    """0: done; 1: it failed, for the printed reason; 130: interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--dry-run", action="store_true", help="print the requests, send nothing")
    way.add_argument("--delete", action="store_true", help="delete endpoint, model and scaling")
    options = parser.parse_args()
    requests = json.loads(Path(__file__).with_name("sagemaker.json").read_text(encoding="utf-8"))
    try:
        if options.dry_run:
            print(json.dumps(requests, indent=2))
        elif options.delete:
            delete(requests)
        else:
            create(requests)
            print("in service; python deploy_boto3.py --delete ends the cost")
    except DeploymentError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run it again to go on, or with --delete to remove all", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
