"""Measured levels inside a profile's file, by which its predictions are corrected.

A level names its machine. A machine outside the catalog is rebuilt from its accelerators, `local`
from the figures in the profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lmi_bench.analysis.level.cells import MeasuredLevel
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, MeasuredMachine
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.accelerators import find_accelerator
from lmi_bench.catalog.instances import Instance, bare_machine, find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.models.shape import ModelShape

_OF_SETUP = ("tensor_parallel", "dtype", "kv_dtype", "speculation")


def cell_to_json(cell: MeasuredLevel) -> dict[str, Any]:
    """The level as plain values, without fields that have their default."""
    content: dict[str, Any] = {
        "model": {
            item.name: _plain(getattr(cell.setup.shape, item.name))
            for item in fields(ModelShape)
            if getattr(cell.setup.shape, item.name) != item.default
        },
        "machine": {
            "instance": cell.setup.instance.instance_type,
            "accelerator": cell.setup.instance.accelerator.name,
            "num_accelerators": cell.setup.instance.num_accelerators,
        },
    }
    for part in (cell.setup, cell):
        for item in fields(part):
            value = getattr(part, item.name)
            if item.name == "load":
                content["concurrency"] = cell.concurrency
            elif item.name not in ("shape", "instance", "setup") and value != item.default:
                content[item.name] = _plain(value)
    if cell.rate_per_s is not None:
        content["rate_per_s"] = cell.rate_per_s
    return content


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def cell_from_json(content: Mapping[str, Any], machine: MeasuredMachine | None) -> MeasuredLevel:
    """The level that `cell_to_json` wrote.

    machine  the machine that `local` means
    Raises InputError where the level's machine is not known.
    """
    try:
        values = dict(content)
        model = dict(values.pop("model"))
        model["aliases"] = tuple(model.get("aliases", ()))
        where = values.pop("machine")
        values["arrivals_s"] = tuple(values.get("arrivals_s", ()))
        of_setup = {name: values.pop(name) for name in _OF_SETUP if name in values}
        setup = Setup(ModelShape(**model), _machine(where, machine), **of_setup)
        load = Load(values.pop("concurrency") or None, values.pop("rate_per_s", None))
        return MeasuredLevel(setup, load=load, **values)
    except (KeyError, TypeError) as exc:
        raise InputError(f"not a measured level of a profile: {exc}") from exc


def _machine(where: Mapping[str, Any], machine: MeasuredMachine | None) -> Instance:
    name = str(where["instance"])
    if name == LOCAL_NAME:
        if machine is None:
            raise InputError("the profile has levels of `local` but no figures of that machine")
        return machine.instance()
    try:
        return find_instance(name)
    except InputError:
        return bare_machine(
            find_accelerator(str(where["accelerator"])), int(where["num_accelerators"])
        )
