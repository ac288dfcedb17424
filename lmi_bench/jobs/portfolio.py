"""`recommend --portfolio`: several models, on shared machines or with an endpoint each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmi_bench.analysis.fleet.portfolio import Portfolio, SharedFleet, member_of, share_machines
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, planned_dtype
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import note, print_table, progress, say
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.money import Money
from lmi_bench.targets.profiles import find_profile


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str
    rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    input_tokens: Annotated[int, Field(ge=1)]
    output_tokens: Annotated[int, Field(ge=1)]
    name: str | None = None
    dtype: str | None = None
    slo: tuple[str, ...] = ()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: Annotated[tuple[_Model, ...], Field(min_length=1)]


def run(
    path: Path,
    *,
    instances: tuple[str, ...],
    degrees: tuple[int, ...],
    profile: str | None,
    money: Money,
    json_file: Path | None,
) -> None:
    """Read, plan, print, save. Raises InputError for what cannot be planned."""
    models = _read(path).models
    considered = tuple(find_instance(name) for name in instances) or all_instances()
    machines, _ = money.requirements().split_by_region(money.reprice(considered))
    members = []
    with progress() as report:
        for index, each in enumerate(models):
            report(each.name or each.model, index, len(models))
            if (told := dtype_note(each.model, each.dtype)) is not None:
                note(told)
            request = RecommendRequest(
                Workload(
                    find_model(each.model),
                    planned_dtype(each.model, each.dtype),
                    each.input_tokens,
                    each.output_tokens,
                ),
                find_profile(profile),
                rate_per_s=each.rate_per_s,
                slos=tuple(parse_slo(text) for text in each.slo),
                instances=tuple(machines),
                degrees=degrees or None,
            )
            name = each.name or each.model
            members.append(member_of(name, request, lambda _text, _share: None))
    answer = share_machines(
        members,
        machines,
        purchase=money.purchase_plan(),
        availability=money.availability_wanted(),
    )
    _print(answer)
    if json_file is not None:
        write_text(json_file, json.dumps(answer.to_json(), indent=2) + "\n")
        say(f"portfolio: {json_file}")


def _read(path: Path) -> _File:
    try:
        return _File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path} is not YAML: {exc}") from exc
    except ValidationError as exc:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}" for each in exc.errors()
        )
        raise InputError(
            f"{path}: {wrong}; a portfolio is models: [{{model, rate_per_s, input_tokens, "
            "output_tokens, slo, dtype, name}}]"
        ) from exc


def _print(answer: Portfolio) -> None:
    rows = [*_rows(answer.groups, "shared"), *_rows(answer.separate, "an endpoint each")]
    print_table("Models on machines", rows, left=("models", "plan"), whole=("fleet",))
    for group in answer.groups:
        for number, machine in enumerate(group.placed, start=1):
            copies = ", ".join(f"{name} (TP {degree})" for name, degree in machine)
            say(f"{group.instance} no. {number}: {copies}")
    saved = answer.separate_usd_per_hour - answer.usd_per_hour
    say(
        f"shared: USD {answer.usd_per_hour:,.2f} per hour; an endpoint each: USD "
        f"{answer.separate_usd_per_hour:,.2f}; sharing saves USD {saved:,.2f} per hour"
    )
    say(
        "a device serves one model; models on one machine fail together, and what one host costs "
        "several of them is not in the plan: measure both at once before buying"
    )


def _rows(fleets: tuple[SharedFleet, ...], plan: str) -> list[dict[str, str]]:
    return [
        {
            "plan": plan,
            "fleet": f"{fleet.machines} x {fleet.instance}",
            "models": ", ".join(
                f"{name}: {need.copies} at TP {need.tensor_parallel}"
                for name, need in zip(fleet.names, fleet.needs, strict=True)
            ),
            "USD/h": f"{fleet.usd_per_hour:,.2f}",
        }
        for fleet in fleets
    ]
