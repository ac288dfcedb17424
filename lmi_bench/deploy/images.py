"""Pinned container images by framework and version.

Source: aws/deep-learning-containers; each row of data/images.csv names its own.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.deploy.option_table import data_file

ACCOUNT: Final = "763104351884"
"""Registry account of most regions; the user states the account of others."""


@dataclass(frozen=True, slots=True)
class Image:
    """One published image. family: lmi, trtllm, deepspeed or neuronx; vllm: the version inside."""

    family: str
    djl: str
    tag: str
    vllm: str
    source: str

    def uri(self, region: str, account: str = ACCOUNT) -> str:
        """Its address in a region's registry."""
        suffix = ".com.cn" if region.startswith("cn-") else ".com"
        return f"{account}.dkr.ecr.{region}.amazonaws{suffix}/djl-inference:{self.tag}"


@cache
def all_images() -> tuple[Image, ...]:
    """All known images, oldest first."""
    return tuple(Image(**row) for row in csv.DictReader(data_file("images.csv").splitlines()))


def find_image(family: str, version: str | None = None) -> Image:
    """The newest image of a family, or that of a version: 0.36.0, lmi28, or a whole tag.

    Raises InputError if no image or several images match.
    """
    images = [image for image in all_images() if image.family == family]
    if not images:
        families = sorted({image.family for image in all_images()})
        raise InputError(f"no images of {family!r} are known; known: {', '.join(families)}")
    if version is None:
        return images[-1]
    found = [
        image
        for image in images
        if version in (image.djl, image.tag) or f"-{version}." in image.tag
    ]
    if len(found) > 1:
        tags = ", ".join(image.tag for image in found)
        raise InputError(f"{len(found)} images have djl-serving {version}: pin one of {tags}")
    if not found:
        tags = ", ".join(image.tag for image in images)
        raise InputError(f"no {family} image {version!r}; known: {tags}")
    return found[0]
