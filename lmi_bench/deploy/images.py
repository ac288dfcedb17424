"""Published container images, the machines that they run on, and the registries of each region.

Source: aws/deep-learning-containers and the SageMaker SDK; each row of data/images.csv and
data/regions.csv names its own.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.option_table import nearest
from lmi_bench.deploy.settings import Server

_FIRST_CUDA: Final = ((10.3, "cu129"), (10.0, "cu128"), (8.9, "cu118"))
"""A compute capability, and the first version of CUDA that compiles for it; the highest first."""

SERVER_FACTS: Final = {row["server"]: row for row in read_rows("servers.csv", "deploy")}
"""Of each server the command and image of its own, and the prefix of its arguments as variables; on
Kubernetes the gauges of running and waiting requests, and arguments of the pods of a group."""
SERVERS: Final = {name: tuple(row["families"].split()) for name, row in SERVER_FACTS.items()}
"""Servers, and the families of images that their files configure; the first one is the default."""


@dataclass(frozen=True, slots=True)
class Image:
    """One published image.

    family              lmi, trtllm, vllm, sglang, tgi, ...: images with one way to configure them
    engine_version      version of the engine inside; empty where no source states it
    djl                 version of djl-serving; empty outside LMI
    compute_capability  the lowest that its kernels are compiled for, such as 7.5
    ami                 InferenceAmiVersion whose driver fits its CUDA; empty: the default
    """

    family: str
    repository: str
    tag: str
    platform: str
    engine: str
    engine_version: str
    djl: str
    cuda: str
    python: str
    arch: str
    accelerator: str
    compute_capability: str
    ami: str
    source: str
    date: str

    def uri(self, region: str, account: str | None = None) -> str:
        """Its address in a region's registry; raises InputError for an unknown region."""
        if account is None and not self.is_in(region):
            raise InputError(f"{region} has no {self.repository} images; --account names a registry")
        row = _regions().get(region, {"domain": "amazonaws.com"})
        registry = account or row["account"]
        return f"{registry}.dkr.ecr.{region}.{row['domain']}/{self.repository}:{self.tag}"

    def is_in(self, region: str) -> bool:
        """Whether AWS publishes it in a region; raises InputError for an unknown region."""
        row = _regions().get(region)
        if row is None:
            raise InputError(
                f"no image registry is known for region {region!r}{nearest(region, _regions())}; --account names one"
            )
        return self.repository not in row["without"].split()

    def is_named(self, version: str) -> bool:
        """True for its djl-serving or engine version, its tag, or an LMI version such as lmi28."""
        named = (self.djl, self.tag, self.engine_version if self.family != "lmi" else "")
        return version in named or f"-{version}." in self.tag

    def problem(self, instance: Instance) -> str | None:
        """Why it does not run on a machine, or None."""
        device = instance.accelerator
        vendor = "aws" if self.accelerator == "neuron" else "nvidia"
        if device.vendor != vendor:
            return f"it is for {'Neuron devices' if vendor == 'aws' else 'NVIDIA GPUs'}"
        if device.host != self.arch:
            return f"it is for {self.arch} hosts, not {device.host}"
        has = device.compute_capability
        if has is None or not self.cuda:
            return None
        if has < float(self.compute_capability):
            return f"it needs compute capability {self.compute_capability}, {device.name} has {has}"
        first = next((cuda for known, cuda in _FIRST_CUDA if has >= known), "")
        return f"{device.name} needs {first}, it has {self.cuda}" if self.cuda < first else None


@dataclass(frozen=True, slots=True)
class Container:
    """What a server's container is given.

    environment     variables; secrets: those whose values are read at deployment
    model_data_uri  where SageMaker finds the weights; None: the container fetches them
    ami             the hosts' InferenceAmiVersion; empty: SageMaker's default
    command, arguments  of a pod; without host and port
    """

    image: str
    environment: Mapping[str, str]
    secrets: Sequence[str] = ()
    model_data_uri: str | None = None
    ami: str = ""
    command: Sequence[str] = ()
    arguments: Sequence[str] = ()


@cache
def all_images() -> tuple[Image, ...]:
    """All known images, oldest first in each family."""
    return tuple(Image(**row) for row in read_rows("images.csv", "deploy"))


@cache
def _regions() -> dict[str, dict[str, str]]:
    return {row["region"]: row for row in read_rows("regions.csv", "deploy")}


def find_image(family: str, version: str | None = None, instance: Instance | None = None) -> Image:
    """The image of a version: 0.36.0, lmi28, or a whole tag; without one the newest that runs on
    the machine, else the newest of all.

    Raises InputError if no image or several match.
    """
    images = [image for image in all_images() if image.family == family]
    if version is None:
        running = (each for each in reversed(images) if instance is None or each.problem(instance) is None)
        return next(running, images[-1])
    found = [image for image in images if image.is_named(version)]
    tags = ", ".join(image.tag for image in found or images)
    if not found:
        raise InputError(f"no {family} image {version!r}; known: {tags}")
    if len(found) > 1:
        raise InputError(f"{len(found)} images have djl-serving {version}: pin one of {tags}")
    return found[0]


def choose_image(server: Server, instance: Instance) -> tuple[str, Image | None]:
    """The address of a server's image, and the image if it is known.

    Raises InputError for an image of another server, or one that does not run on the machine.
    """
    families, named = SERVERS[server.kind], server.image or ""
    is_address = "/" in named
    if is_address and server.account is not None:
        raise InputError("--account has no effect with --image ADDRESS: leave one out")
    tail = named.rpartition("/")[2]
    names = ((each, (f"{each.repository}:{each.tag}", each.tag)) for each in all_images())
    image = next((each for each, known in names if tail in known), None)
    if image is None and is_address:
        return named, None
    if image is None:
        usual = families[:1] if server.kind == "lmi" else families
        of_version = (i.family for i in all_images() if i.family in usual and i.is_named(named))
        image = find_image(next(of_version, families[0]), named or None, instance)
    if image.family not in families:
        raise InputError(f"--image {named}: {image.tag} is for {image.family}, not {server.kind}")
    check_machine(image, instance)
    return named if is_address else image.uri(server.region, server.account), image


def ami_of(address: str) -> str:
    """The InferenceAmiVersion for the CUDA version that an address states; empty without one."""
    found = re.search(r"cu1\d", address)
    known = {each.cuda[:4]: each.ami for each in all_images() if each.ami}
    return known.get(found[0], "") if found else ""


def machine_problem(engines: Collection[str], instance: Instance) -> str | None:
    """Why no published SageMaker image of these engines runs on a machine; None if one does.

    Without any known image of them nothing is a problem.
    """
    images = [one for one in all_images() if one.engine in engines and one.platform == "sagemaker"]
    is_neuron = instance.accelerator.vendor == "aws"
    images.sort(key=lambda image: (image.accelerator == "neuron") == is_neuron)
    problems = [image.problem(instance) for image in images]
    if None in problems or not images:
        return None
    return f"no {' or '.join(sorted(engines))} image for SageMaker runs on it: {problems[-1]}"


def check_machine(image: Image, instance: Instance) -> None:
    """Raise InputError if an image does not run on a machine, with one that does."""
    problem = image.problem(instance)
    if problem is None:
        return
    others = [other for other in all_images() if other.problem(instance) is None]
    same = [other for other in others if other.family == image.family]
    advice = "no known image does"
    for other in (same or others)[-1:]:
        advice = f"{other.repository}:{other.tag} does"
        if not same:
            advice += f" (family {other.family}, for {other.platform}, not written by this command)"
    raise InputError(f"{image.tag} does not run on {instance.instance_type}: {problem}; {advice}")
