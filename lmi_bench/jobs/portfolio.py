"""A portfolio: several models of a file, packed onto shared machines."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from lmi_bench.analysis.fleet.money import parse_availability
from lmi_bench.analysis.fleet.portfolio import Portfolio, member_of, share_machines
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.load import Load
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs import planned
from lmi_bench.jobs.files import checked, read_yaml
from lmi_bench.jobs.recommend import with_images
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
    expected = "models: [{model, rate_per_s, input_tokens, output_tokens, slo, dtype, name}]"
    source = str(settings.portfolio)
    file = checked(_File, read_yaml(settings.portfolio), source=source, expected=expected)
    money, names = settings.money, settings.instances
    considered = tuple(planned.named_machine(name, money.price_list) for name in names) or None
    requirements = planned.requirements_of(money, settings.limits)
    machines, _ = requirements.split_by_region(planned.repriced(considered, money.price_list))
    members = []
    for index, each in enumerate(file.models):
        name = each.name or each.model
        listener.progress(name, index, len(file.models))
        for text in planned.model_notes(each.model, each.dtype):
            listener.note(text)
        request = RecommendRequest(
            planned.planned_workload(each.model, each.dtype, each.input_tokens, each.output_tokens),
            find_profile(settings.profile),
            load=Load(rate_per_s=each.rate_per_s),
            slos=tuple(parse_slo(text) for text in each.slo),
            instances=tuple(machines),
            degrees=settings.tensor_parallel or None,
        )
        request, without_image = with_images(settings, request)
        for one in without_image if names and index == 0 else ():
            listener.note(f"{one.instance_type} is left out: {one.reason}")
        members.append(member_of(name, request))
    return share_machines(
        members,
        machines,
        purchase=planned.purchase_of(money),
        availability=parse_availability(money.availability),
    )
