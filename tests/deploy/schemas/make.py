"""Writes kubernetes.json.gz: the schemas of the kinds that kubernetes.py and loadgen.py write.

    python make.py DEFINITIONS.json KEDA_CRD.yaml KSERVE_CRD.yaml LWS_CRD.yaml
    python make.py kubernetes.json.gz LWS_CRD.yaml      replaces or adds one kind
    python make.py kubernetes.json.gz DEFINITIONS.json  replaces or adds Kubernetes' own kinds

DEFINITIONS: _definitions.json of v1.37.0-local-strict in kubernetes-validate 1.37.0 (PyPI), from
Kubernetes' OpenAPI document; the CRDs: keda.sh_scaledobjects.yaml of kedacore/keda at 8b4f083 and
config/crd/full/llmisvc/serving.kserve.io_llminferenceservices.yaml of kserve/kserve at aaac4e2, and
config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml of kubernetes-sigs/lws at 060ab4d.
All are under Apache-2.0. As kubeconform -strict does, fields that a schema does not name are
refused. A LeaderWorkerSet's pod templates are held against Kubernetes' own schema of a pod.
"""

import gzip
import json
import sys
from pathlib import Path

import yaml

KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "Job": "io.k8s.api.batch.v1.Job",
}
POD_TEMPLATE = "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"
NEEDLESS = ("description", "x-kubernetes-group-version-kind", "x-kubernetes-validations", "format")


def strict(schema):
    """Without descriptions; objects with named fields have no others."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    found = {
        key: {name: strict(each) for name, each in value.items()} if key == "properties" else strict(value)
        for key, value in schema.items()
        if key not in NEEDLESS or key == "properties"
    }
    if "properties" in found and not open_ended:
        found.setdefault("additionalProperties", False)
    return found


def used(definitions, name, found):
    """A definition, and all that it refers to."""
    if name in found:
        return
    found[name] = strict(definitions[name])
    for text in json.dumps(found[name]).split('"$ref": "')[1:]:
        used(definitions, text.partition('"')[0].rpartition("/")[2], found)


def main(*paths):
    found, kinds = {}, {}
    for path in paths:
        if path.endswith(".gz"):
            found, kinds = json.loads(gzip.decompress(Path(path).read_bytes())).values()
            continue
        if path.endswith(".json"):
            text = Path(path).read_text().replace("_definitions.json#", "#")
            for kind, name in KINDS.items():
                used(json.loads(text)["$defs"], name, found)
                kinds[kind] = {"$ref": f"#/$defs/{name}"}
            continue
        spec = yaml.safe_load(Path(path).read_text())["spec"]
        version = next(each for each in reversed(spec["versions"]) if each["served"])
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["apiVersion"] = {"enum": [f"{spec['group']}/{version['name']}"]}
        schema["properties"]["metadata"] = {"type": "object"}
        if spec["names"]["kind"] == "LeaderWorkerSet":
            parts = schema["properties"]["spec"]["properties"]["leaderWorkerTemplate"]["properties"]
            parts |= {key: {"$ref": POD_TEMPLATE} for key in ("leaderTemplate", "workerTemplate")}
        kinds[spec["names"]["kind"]] = schema
    content = json.dumps({"$defs": found, "kinds": kinds}, separators=(",", ":"))
    out = Path(__file__).with_name("kubernetes.json.gz")
    out.write_bytes(gzip.compress(content.encode(), mtime=0))
    print(out, out.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
