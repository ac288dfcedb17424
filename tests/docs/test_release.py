"""docs/release.md names every dependency, and the SBOM holds what is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from benchmarks.sbom import EXTRAS, bill, licences, requirements

ROOT = Path(__file__).parents[2]


def test_the_page_lists_every_dependency_with_the_licence_that_it_states():
    page = (ROOT / "docs" / "release.md").read_text("utf-8")
    rows = re.findall(r"^\| (\S+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    names = [each.name for extra in (None, *EXTRAS) for each in requirements(extra)]
    assert [name for name, _ in rows if name not in ("package",)] == names
    assert "not stated" not in page
    assert licences() in page, "python benchmarks/sbom.py --licences prints the table anew"


def test_the_sbom_has_direct_and_indirect_packages_with_their_versions():
    found = {each["name"]: each["version"] for each in bill(["engine"])["components"]}
    assert found["numpy"] == metadata.version("numpy")
    assert found["torch"] == metadata.version("torch")
    assert found["botocore"] == metadata.version("botocore")  # boto3's
    assert found["multidict"] == metadata.version("multidict")  # of yarl's, of aiohttp's
    assert "pytest" not in found
    assert "torch" not in {each["name"] for each in bill([])["components"]}


def test_the_sbom_is_written_as_cyclonedx(tmp_path):
    path = tmp_path / "sbom.json"
    subprocess.run([sys.executable, "benchmarks/sbom.py", "--out", path], cwd=ROOT, check=True)
    content = json.loads(path.read_text("utf-8"))
    assert (content["bomFormat"], content["specVersion"]) == ("CycloneDX", "1.6")
    references = [each["bom-ref"] for each in content["components"]]
    assert len(references) == len(set(references)) > 20
    assert all(each["licenses"][0]["license"]["name"] for each in content["components"])
