"""Builds the files that run a deployment plan on a server, as a folder or an archive."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_bench.core.errors import InputError, file_reason
from lmi_bench.deploy.checks import check_settings, era_of
from lmi_bench.deploy.images import Image, all_images, check_machine, find_image
from lmi_bench.deploy.option_table import environment_of
from lmi_bench.deploy.plan import DeploymentPlan
from lmi_bench.deploy.properties import render_properties
from lmi_bench.deploy.sagemaker import Container, endpoint_requests, template
from lmi_bench.deploy.server_settings import (
    lmi_settings,
    tgi_environment,
    unsupported_settings,
    vllm_arguments,
)
from lmi_bench.deploy.settings import EndpointSettings, Server

PROPERTIES: Final = "serving.properties"
_MOUNTED: Final = "/opt/ml/model"  # where SageMaker puts the model data
_FAMILIES: Final = {"tensorrtllm": "trtllm", "deepspeed": "deepspeed", "neuronx": "neuronx"}
_PACKED: Final = (PROPERTIES, "model.py", "requirements.txt")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files by name, the pinned image, and warnings for the user.

    has_components  True if each copy is an inference component
    """

    files: Mapping[str, str]
    image: str | None
    traps: tuple[str, ...] = ()
    has_components: bool = False


def build_bundle(plan: DeploymentPlan, server: Server, endpoint: EndpointSettings) -> Bundle:
    """The files of a plan for one server; raises InputError for an unsupported plan."""
    if server.kind == "vllm":
        return _vllm_bundle(plan, server)
    files: dict[str, str] = {}
    address, image = _image(plan, server)
    if server.kind == "tgi":
        environment = tgi_environment(plan, trust_remote_code=server.trust_remote_code)
        traps = _unsupported(plan, server.kind, image)
    else:
        era = era_of(image.djl) if image else "C"
        vllm = image.engine_version if image and image.engine == "vllm" else ""
        settings = lmi_settings(
            plan,
            image,
            trust_remote_code=server.trust_remote_code,
            model_loading_timeout_s=endpoint.startup_s,
        )
        if server.model_data_uri is not None:
            settings["option.model_id"] = _MOUNTED
        verdict = check_settings(settings, era=era, vllm=vllm)
        verdict.raise_mistakes("the generated serving.properties")
        traps = verdict.traps + _unsupported(plan, server.kind, image)
        comments = (plan.describe(), plan.basis, f"image {address}")
        in_archive = {k: v for k, v in settings.items() if v != _MOUNTED}
        files[PROPERTIES] = render_properties(in_archive, comments=comments)
        environment = environment_of(settings)
    lines = (f"# {plan.describe()}", f"# {plan.basis}", *map("=".join, environment.items()))
    files[f"{server.kind}.env"] = "\n".join(lines) + "\n"
    ami = image.ami if image else ""
    container = Container(address, environment, server.model_data_uri, ami)
    one_copy = server.kind == "tgi"
    requests = endpoint_requests(plan, container, endpoint, one_copy_a_container=one_copy)
    content = [{"operation": name, "parameters": parameters} for name, parameters in requests]
    files["sagemaker.json"] = json.dumps(content, indent=2) + "\n"
    files["cloudformation.yaml"] = template(requests, description=plan.describe())
    files["deploy_boto3.py"] = _boto3_script(plan, server.region)
    return Bundle(files, address, traps, "create_inference_component" in dict(requests))


def _vllm_bundle(plan: DeploymentPlan, server: Server) -> Bundle:
    arguments = vllm_arguments(plan, trust_remote_code=server.trust_remote_code)
    line = " \\\n  ".join(shlex.quote(argument) for argument in ("vllm", "serve", *arguments))
    script = f"#!/bin/sh\n# {plan.describe()}\n# {plan.basis}\nexec {line}\n"
    one_copy = (
        f"vllm serve starts one copy: run it {plan.copies} times, each with its own "
        "accelerators (CUDA_VISIBLE_DEVICES) and port"
    )
    return Bundle({"vllm-serve.sh": script}, None, () if plan.copies == 1 else (one_copy,))


def _unsupported(plan: DeploymentPlan, server: str, image: Image | None) -> tuple[str, ...]:
    missing = unsupported_settings(plan, server, image)
    if not missing:
        return ()
    return (f"these files do not set {', '.join(missing)}: {server} has no such setting here",)


def write_bundle(bundle: Bundle, folder: Path) -> None:
    """Write the files; raises InputError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in bundle.files.items():
        (folder / name).write_text(text, encoding="utf-8")


def pack_model(folder: Path, archive: Path) -> list[str]:
    """Pack a folder's serving.properties, model.py and requirements.txt into a model.tar.gz.

    The same files give the same bytes. Returns the names; raises InputError if
    serving.properties is missing or the archive exists.
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
    archive.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return names


def unpack_properties(archive: Path) -> str:
    """The serving.properties at the root of a model.tar.gz; raises InputError if missing."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            names = tar.getnames()
            for name in (PROPERTIES, f"./{PROPERTIES}"):
                if name in names:
                    member = tar.extractfile(name)
                    if member is not None:
                        return member.read().decode()
    except (OSError, tarfile.TarError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read {archive}: {file_reason(exc)}") from exc
    deeper = [name for name in names if name.endswith("/" + PROPERTIES)]
    where = f"; {deeper[0]} is in a folder, where no container looks" if deeper else ""
    raise InputError(f"{archive} has no {PROPERTIES} at its root{where}")


def _image(plan: DeploymentPlan, server: Server) -> tuple[str, Image | None]:
    """The image's address; and the image, if it is known."""
    instance, named = plan.setup.instance, server.image
    if named is None or "/" not in named:
        found = (family for part, family in _FAMILIES.items() if part in (named or ""))
        family = "tgi" if server.kind == "tgi" else next(found, "lmi")
        image = find_image(family, named, instance)
        return image.uri(server.region, server.account), image
    for image in all_images():
        if named.endswith(f"/{image.repository}:{image.tag}"):
            check_machine(image, instance)
            return named, image
    return named, None


def _boto3_script(plan: DeploymentPlan, region: str) -> str:
    """A script that sends the requests in sagemaker.json when the user runs it."""
    return f'''"""Creates the endpoint of sagemaker.json: {plan.describe()}.

Running this starts billing. Needs AWS credentials:  python deploy_boto3.py
"""

import json
from pathlib import Path

import boto3

REGION = "{region}"
SCALING = ("register_scalable_target", "put_scaling_policy")
sagemaker = boto3.client("sagemaker", region_name=REGION)
scaling = boto3.client("application-autoscaling", region_name=REGION)

for request in json.loads(Path(__file__).with_name("sagemaker.json").read_text()):
    name, parameters = request["operation"], request["parameters"]
    if name in ("create_inference_component", *SCALING):
        sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=endpoint)
    print(name)
    getattr(scaling if name in SCALING else sagemaker, name)(**parameters)
    if name == "create_endpoint":
        endpoint = parameters["EndpointName"]
'''
