"""Builds the files that run a deployment plan on a server, as a folder or an archive."""

import gzip
import io
import json
import math
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Final

from lmi_bench.analysis.fleet.start_up import DOUBT
from lmi_bench.catalog.instances import endpoint_quota
from lmi_bench.catalog.models import is_gated
from lmi_bench.core.durable import UNFINISHED, write_inside
from lmi_bench.core.errors import UNREADABLE, InputError, file_reason
from lmi_bench.deploy import server_settings
from lmi_bench.deploy.checks import check_settings, era_of
from lmi_bench.deploy.engine_arguments import engine_arguments
from lmi_bench.deploy.images import SERVER_FACTS, Container, ami_of, choose_image
from lmi_bench.deploy.kubernetes import kubernetes_files
from lmi_bench.deploy.option_table import environment_of
from lmi_bench.deploy.plan import DeploymentPlan
from lmi_bench.deploy.properties import render_properties
from lmi_bench.deploy.sagemaker import endpoint_requests, parameter_name, template
from lmi_bench.deploy.settings import LONGEST_WAIT_S, SECRET, EndpointSettings, Server

PROPERTIES: Final = "serving.properties"
_MOUNTED: Final = "/opt/ml/model"  # where SageMaker puts the model data
_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_ARGUMENTS: Final = {"vllm": server_settings.vllm_arguments, "sglang": server_settings.sglang_arguments}
_ONE_COPY: Final = "# one copy; each further one needs its own CUDA_VISIBLE_DEVICES and --port\n"
_SHORTEST_WAIT_S: Final = 600
_NAME_STEM: Final = 36
_PACKED: Final = (PROPERTIES, "model.py", "requirements.txt")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files by name, the pinned image, and warnings for the user.

    name            of the endpoint, or of the Kubernetes objects
    quota           of the account that the endpoint needs; empty on Kubernetes
    has_components  True if each copy is an inference component
    """

    files: Mapping[str, str]
    image: str
    name: str
    traps: tuple[str, ...] = ()
    has_components: bool = False
    quota: str = ""


def build_bundle(plan: DeploymentPlan, server: Server, endpoint: EndpointSettings, *, date: str = "") -> Bundle:
    """The files of a plan for one server; raises InputError for an unsupported plan.

    date  ends the endpoint's name where none is stated, such as 20261123
    """
    address, image = choose_image(server, plan.setup.instance)
    gated = [name for name in (plan.weights.location, plan.draft or "") if is_gated(name)]
    plan = replace(plan, image=image, trusts_code=server.trust_remote_code)
    if server.model_data_uri is not None:
        plan = replace(plan, weights=replace(plan.weights, location=_MOUNTED))
    endpoint, traps = _started(plan, server, endpoint, date)
    stated = {name: text for name, text in server.variables.items() if text is not None}
    secrets = [name for name, text in server.variables.items() if text is None]
    if gated and not {*_TOKENS} & {*server.variables}:
        secrets.append(_TOKENS[0])
        advice = (
            f"kubectl create secret generic {SECRET} --from-literal={_TOKENS[0]}=... in the cluster's namespace"
            if server.is_kubernetes
            else f"set {_TOKENS[0]} for deploy_boto3.py and the container, or the template's "
            f"parameter {parameter_name(_TOKENS[0])}"
        )
        traps += (
            f"{' and '.join(gated)}: gated on the Hub, so its conditions must be accepted there; "
            f"the token is no part of the files: {advice}",
        )
    if server.is_kubernetes:
        return _kubernetes_bundle(plan, server, endpoint, stated, secrets, traps)
    files, environment, more = _server_files(plan, server, endpoint, address)
    traps += more
    if written := sorted({*environment} & {*server.variables}):
        raise InputError(f"--env {written[0]}: the plan writes this variable; leave it out")
    environment |= stated
    machine, most = plan.setup.instance, endpoint.max_instances or plan.instances
    quota = endpoint_quota(machine.instance_type, most)
    comments = (f"# {plan.describe()}", f"# {plan.basis}", f"# quota of the account: {quota}")
    lines = (*comments, *map("=".join, environment.items()), *secrets)
    files[f"{server.kind}.env"] = "\n".join(lines) + "\n"
    of_image = image.ami if image else ami_of(address)  # Blackwell needs a newer driver
    ami = ami_of("cu130") if (machine.accelerator.compute_capability or 0) >= 10 else of_image
    if image is None and not ami:
        traps += (
            "the image's CUDA version is unknown, so InferenceAmiVersion is left out; if the image "
            "needs a newer driver, state it: "
            "--set create_endpoint_config.ProductionVariants.0.InferenceAmiVersion=...",
        )
    container = Container(address, environment, secrets, server.model_data_uri, ami)
    alone = server.kind != "lmi"
    requests = endpoint_requests(plan, container, endpoint, one_copy_a_container=alone)
    if requests["create_model"].get("EnableNetworkIsolation") and not server.model_data_uri:
        traps += ("network isolation: the container cannot fetch its weights; use --model-data",)
    content = [{"operation": name, "parameters": sent} for name, sent in requests.items()]
    files["sagemaker.json"] = json.dumps(content, indent=2) + "\n"
    files["cloudformation.yaml"] = template(requests, description=plan.describe(), secrets=secrets)
    script = (resources.files("lmi_bench.deploy") / "data/deploy_boto3.py.txt").read_text("utf-8")
    files["deploy_boto3.py"] = script.replace('"us-east-1"', json.dumps(server.region), 1)
    name, has_components = str(endpoint.name), "create_inference_component" in requests
    return Bundle(files, address, name, traps, has_components, quota)


def _kubernetes_bundle(
    plan: DeploymentPlan,
    server: Server,
    endpoint: EndpointSettings,
    environment: Mapping[str, str],
    secrets: Sequence[str],
    traps: tuple[str, ...],
) -> Bundle:
    """Kubernetes' files; the image is the engine's own, in the version that AWS's image has."""
    address = server.image or ""
    if "/" not in address:
        assert plan.image is not None  # an unknown image has an address
        if not plan.image.engine_version:
            raise InputError(f"--image {address}: its {server.kind} version is not known; name one")
        address = f"{SERVER_FACTS[server.kind]['image']}:v{plan.image.engine_version}"
    command, words = _command(plan, server.kind)
    if server.kind == "sglang":
        words.append("--enable-metrics")
    if plan.weights.location.startswith("s3://"):
        words += ["--load-format", "runai_streamer"]
        version = plan.image.engine_version if plan.image else ""
        formats = engine_arguments(server.kind, version).get("load_format") if version else None
        if formats and formats.problem(words[-1]):
            raise InputError(f"{server.kind} {version} does not read weights from s3://: copy them")
    pod = Container(address, environment, secrets, command=shlex.split(command), arguments=words)
    assert endpoint.name is not None
    files = kubernetes_files(plan, server, pod, endpoint)
    comments = f"# {plan.describe()}\n# {plan.basis}\n"
    files = {name: comments + text for name, text in files.items()}
    traps += _unsupported(plan, server.kind)
    if plan.hosts > 1 and (bits_per_s := plan.setup.instance.network_bits_per_s):  # of all hosts
        traps += (
            f"the plan counts with {bits_per_s / plan.hosts / 1e9:,.0f} Gbit/s between hosts, as "
            "only EFA has: add vpc.amazonaws.com/efa to the pods, and an image with aws-ofi-nccl",
        )
    return Bundle(files, address, endpoint.name.lower(), traps)


def _command(plan: DeploymentPlan, server: str) -> tuple[str, list[str]]:
    """The command of an engine for one copy, and its words."""
    return SERVER_FACTS[server]["command"], [
        word
        for name, value in _ARGUMENTS[server](plan).items()
        for word in (f"--{name}", value)
        if word not in ("--model", "true")  # vLLM takes the model by its place
    ]


def _server_files(
    plan: DeploymentPlan, server: Server, endpoint: EndpointSettings, address: str
) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """The server's own files, its environment, and the traps of both."""
    image, traps = plan.image, _unsupported(plan, server.kind)
    if server.kind == "tgi":
        return {}, server_settings.tgi_environment(plan), traps
    if server.kind != "lmi":
        command, words = _command(plan, server.kind)
        script = f"#!/bin/sh\n# {plan.describe()}\n# {plan.basis}\n{_ONE_COPY}exec "
        lines = shlex.join(words).replace(" --", " \\\n  --")  # no value begins with dashes
        script += f"{command} {lines}\n"
        variables = {
            SERVER_FACTS[server.kind]["variables"] + name.upper().replace("-", "_"): value
            for name, value in _ARGUMENTS[server.kind](plan).items()
        }
        return {f"{server.kind}-serve.sh": script}, variables, traps
    settings = server_settings.lmi_settings(plan, endpoint.startup_s)
    vllm = image.engine_version if image and image.engine == "vllm" else ""
    verdict = check_settings(settings, era=era_of(image.djl) if image else "C", vllm=vllm)
    verdict.raise_mistakes("the generated serving.properties")
    comments = (plan.describe(), plan.basis, f"image {address}")
    in_archive = {k: v for k, v in settings.items() if v != _MOUNTED}
    properties = render_properties(in_archive, comments=comments)
    return {PROPERTIES: properties}, environment_of(settings), verdict.traps + traps


def _started(
    plan: DeploymentPlan, server: Server, endpoint: EndpointSettings, date: str
) -> tuple[EndpointSettings, tuple[str, ...]]:
    """The endpoint with a name and a time limit to start, and the plan's warnings; one more where
    the limit may be short."""
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", plan.setup.shape.name)[:_NAME_STEM].strip("-")
    name = endpoint.name or "-".join(filter(None, (stem, date)))
    one_container = server.kind == "lmi" and plan.fills_the_machine and not endpoint.components
    workers, downloads = (plan.copies, 1) if one_container else (1, plan.copies * plan.hosts)
    start_up = plan.start_up(workers=workers, downloads=downloads)
    likely_s = start_up.weights_s + start_up.compile_s
    limit_s = max(_SHORTEST_WAIT_S, 60 * math.ceil(DOUBT * likely_s / 60))
    warnings = plan.warnings
    if server.is_kubernetes:
        return replace(endpoint, name=name, startup_s=endpoint.startup_s or limit_s), warnings
    if endpoint.startup_s is not None and endpoint.startup_s > LONGEST_WAIT_S:
        raise InputError(
            f"container_startup_health_check_timeout of {endpoint.startup_s} s: SageMaker accepts "
            f"60 to {LONGEST_WAIT_S} s; a model that loads longer needs faster storage"
        )
    if endpoint.startup_s is None and limit_s > LONGEST_WAIT_S:
        warnings += (
            f"loading may take {likely_s / DOUBT:,.0f} to {likely_s * DOUBT:,.0f} s, and SageMaker "
            f"waits {LONGEST_WAIT_S:,} s: fewer copies a machine, a smaller checkpoint, or weights "
            "on S3 in the same region (--model-data) load faster",
        )
    startup_s = endpoint.startup_s or min(LONGEST_WAIT_S, limit_s)
    return replace(endpoint, name=name, startup_s=startup_s), warnings


def _unsupported(plan: DeploymentPlan, server: str) -> tuple[str, ...]:
    missing = server_settings.unsupported_settings(plan, server)
    text = f"these files do not set {', '.join(missing)}: {server} has no such setting here"
    return (text,) if missing else ()


def write_bundle(bundle: Bundle, folder: Path) -> None:
    """Write all the files or none; raises InputError if the folder exists and is not empty."""
    found = folder.iterdir() if folder.is_dir() else (folder,) if folder.exists() else ()
    if any(path.suffix != UNFINISHED for path in found):  # which a kill leaves
        raise InputError(f"{folder} exists and is not an empty folder: choose another --out")
    unfinished = folder / f".{os.getpid()}{UNFINISHED}"
    try:
        for name, text in bundle.files.items():
            write_inside(unfinished / name, text)
        for path in unfinished.iterdir():
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def pack_model(folder: Path, archive: Path) -> list[str]:
    """Pack a folder's serving.properties, model.py and requirements.txt into a model.tar.gz.

    The same files give the same bytes. Returns the names, and a note without weights; raises
    InputError if serving.properties is missing or the archive exists.
    """
    if archive.exists():
        raise InputError(f"{archive} exists: remove it, or choose another --out")
    names = [name for name in _PACKED if (folder / name).is_file()]
    if PROPERTIES not in names:
        raise InputError(f"{folder} has no {PROPERTIES}: write one with `lmi-bench deploy write`")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            content = (folder / name).read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    write_inside(archive, gzip.compress(packed.getvalue(), mtime=0))
    if "model_id" not in (folder / PROPERTIES).read_text(encoding="utf-8"):
        names.append("no weights: add them to the archive, beside serving.properties")
    return names


def unpack_properties(archive: Path) -> str:
    """The serving.properties at the root of a model.tar.gz; raises InputError if missing."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            names = tar.getnames()
            for name in (PROPERTIES, f"./{PROPERTIES}"):
                if name in names and (member := tar.extractfile(name)) is not None:
                    return member.read().decode()
    except (*UNREADABLE, tarfile.TarError) as exc:
        raise InputError(f"cannot read {archive}: {file_reason(exc)}") from exc
    deeper = [name for name in names if name.endswith("/" + PROPERTIES)]
    where = f"; {deeper[0]} is in a folder, where no container looks" if deeper else ""
    raise InputError(f"{archive} has no {PROPERTIES} at its root{where}")
