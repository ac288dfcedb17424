"""`recommend --portfolio`: several models, on shared machines or with an endpoint each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmi_bench.analysis.fleet.money import parse_availability
from lmi_bench.analysis.fleet.portfolio import Portfolio, member_of, share_machines
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, planned_dtype
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.planned import purchase_of, repriced, requirements_of
from lmi_bench.jobs.settings.recommend import RecommendSettings
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


def plan_portfolio(settings: RecommendSettings, listener: Listener = SILENT) -> Portfolio:
    """Plan the models of a file. Raises InputError for what cannot be planned."""
    assert settings.portfolio is not None
    models = _read(settings.portfolio).models
    money, names = settings.money, settings.instances
    considered = tuple(find_instance(name) for name in names) or all_instances()
    requirements = requirements_of(money, settings.limits)
    machines, _ = requirements.split_by_region(repriced(considered, money.price_list))
    members = []
    for index, each in enumerate(models):
        name = each.name or each.model
        listener.progress(name, index, len(models))
        if (text := dtype_note(each.model, each.dtype)) is not None:
            listener.note(text)
        request = RecommendRequest(
            Workload(
                find_model(each.model),
                planned_dtype(each.model, each.dtype),
                each.input_tokens,
                each.output_tokens,
            ),
            find_profile(settings.profile),
            rate_per_s=each.rate_per_s,
            slos=tuple(parse_slo(text) for text in each.slo),
            instances=tuple(machines),
            degrees=settings.tensor_parallel or None,
        )
        members.append(member_of(name, request, lambda _text, _share: None))
    return share_machines(
        members,
        machines,
        purchase=purchase_of(money),
        availability=parse_availability(money.availability),
    )


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
