"""Writes and checks configurations of other servers; waits until such a server is healthy."""

import http.client
import json
import os
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Final

from lmi_bench.analysis.fleet.recommender import recommend as rank
from lmi_bench.analysis.fleet.request import LONE_REQUEST, RecommendRequest
from lmi_bench.analysis.model.capacity import MemoryPlan, memory_plan_for
from lmi_bench.analysis.model.checkpoint_dtype import planned_dtype
from lmi_bench.analysis.model.profiles import EngineProfile, profile_from_json
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import all_model_entries, find_model
from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.units import plural
from lmi_bench.deploy.aws_jobs import FRAMEWORKS, job_files
from lmi_bench.deploy.bundle import PROPERTIES, Bundle, build_bundle, write_bundle
from lmi_bench.deploy.checks import check_settings, check_variables, container_of
from lmi_bench.deploy.images import SERVERS, choose_image, find_image
from lmi_bench.deploy.limits import profile_of
from lmi_bench.deploy.option_table import Setting, effective_settings, untranslated_variables
from lmi_bench.deploy.plan import DeploymentPlan, plan_from_layout, plan_from_recommendation
from lmi_bench.deploy.properties import parse_properties
from lmi_bench.deploy.server_settings import unsupported_settings
from lmi_bench.deploy.settings import EndpointSettings
from lmi_bench.jobs.files import load_recommendation
from lmi_bench.jobs.planned import planned_workload
from lmi_bench.jobs.serving_file import load_properties
from lmi_bench.jobs.settings.deploy import DeploySettings, LimitsSettings
from lmi_bench.models.shape import tensor_parallel_problem
from lmi_bench.targets.drafting import refuse_sagemaker_draft
from lmi_bench.targets.profiles import find_profile

_LICENSED: Final = "meta-llama/"
_PROBE_EVERY_S: Final = 1.0
_LONE_TOKENS: Final = 256  # of a lone request's prompt, and of its answer


def write_deployment(settings: DeploySettings, listener: Listener = SILENT) -> tuple[DeploymentPlan, Bundle]:
    """Write the folder; returns the plan, and the files that run it. Raises InputError before
    anything is written."""
    server, endpoint = settings.server, settings.endpoint
    if server.kind not in SERVERS:
        raise InputError(f"--server {server.kind}: use one of {', '.join(SERVERS)}")
    excluded_by = {
        "your own weights (--model-data, --model-id)": server.model_data_uri or server.model_id,
        "inference components (--components)": endpoint.components,
    }
    draft = settings.stated.draft
    refuse_sagemaker_draft(draft, [name for name, is_on in excluded_by.items() if is_on])
    plan = _plan(settings, listener)
    _check_licence(plan, endpoint)
    if draft and f"draft {plan.draft}" in unsupported_settings(plan, server.kind):
        raise InputError(f"--draft {draft}: {server.kind} takes no such draft here; leave it out")
    bundle = build_bundle(plan, server, endpoint, date=time.strftime("%Y%m%d", time.gmtime()))
    if endpoint.jobs_output_uri is not None:
        if server.is_kubernetes or server.kind not in FRAMEWORKS:
            raise InputError("--aws-jobs needs SageMaker, and --server lmi or vllm")
        if settings.recommendation is None:
            raise InputError("--aws-jobs needs a recommendation: its lengths, load and machines")
        answer = load_recommendation(settings.recommendation).answer
        files, left_out = job_files(plan, answer, replace(endpoint, name=bundle.name), server)
        bundle = replace(bundle, files={**bundle.files, **files}, traps=bundle.traps + left_out)
    write_bundle(bundle, settings.out)
    return plan, bundle


def check_file(
    path: Path | None, djl_version: str, allowed: tuple[str, ...]
) -> tuple[str, dict[str, Setting], tuple[str, ...]]:
    """The server that reads a file, such as djl-serving 0.38.0, its effective settings and the
    traps. Raises InputError for mistakes."""
    variables = None if path is None else _variables_file(path)
    values = {} if variables is None else parse_properties(read_text(variables))
    if variables is not None and variables.stem != "lmi":
        kind = variables.stem
        check_variables(kind, values, allowed).raise_mistakes(str(variables))
        found = {name: Setting(value, variables.name) for name, value in values.items()}
        return f"{kind} {find_image(kind).engine_version}", found, ()
    source = "the environment" if path is None else str(path)
    properties = {} if path is None or variables else load_properties(path)
    environ = values or dict(os.environ)
    era, vllm = container_of(djl_version)
    settings = effective_settings(properties, environ, source=source, era=era)
    if not settings:
        raise InputError("nothing to check: give a serving.properties, or set OPTION_ variables")
    values = {name: setting.value for name, setting in settings.items()}
    verdict = check_settings(values, era=era, vllm=vllm, allowed=allowed)
    verdict.raise_mistakes(source)
    unread = (
        f"{name} is set, but LMI containers do not read it; option.max_model_len is theirs"
        for name in untranslated_variables(environ)
    )
    return f"djl-serving {djl_version}", settings, (*unread, *verdict.traps)


def _variables_file(path: Path) -> Path | None:
    """The .env file of a server: itself, or the one in a folder without properties."""
    names = [f"{kind}.env" for kind in SERVERS]
    if not path.is_dir():
        return path if path.name in names else None
    found = [path / name for name in names if (path / name).is_file()]
    return found[0] if found and not (path / PROPERTIES).exists() else None


def wait_until_healthy(url: str, limit_s: float) -> tuple[float | None, str]:
    """Ask /ping once a second: seconds until it answers 200, None if never; and its last answer."""
    address = f"{url.rstrip('/')}/ping"
    if not address.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is no address: write one such as http://127.0.0.1:8080")
    start_s = time.monotonic()
    last = "no answer yet"
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310 - http only
                last = f"status {answer.status}"
                if answer.status == 200:
                    return time.monotonic() - start_s, last
        except http.client.InvalidURL as exc:
            raise InputError(f"{url!r} is no address: {exc}") from exc
        except (OSError, http.client.HTTPException) as exc:
            status = getattr(exc, "code", None)  # of an answer that urllib raises
            last = f"status {status}" if status else str(getattr(exc, "reason", exc))
        if time.monotonic() - start_s + _PROBE_EVERY_S > limit_s:
            return None, last
        time.sleep(_PROBE_EVERY_S)


def sequence_limits(settings: LimitsSettings) -> list[tuple[Setup, int, MemoryPlan, MemoryPlan]]:
    """One copy by its degree, tokens of a request, and the memory at that length and half through
    its output. Raises InputError if no degree is possible."""
    shape, instance = find_model(settings.model), find_instance(settings.instance)
    profile = find_profile(settings.profile, settings.kv_tokens)
    dtype, stated = planned_dtype(settings.model, settings.dtype), settings.tensor_parallel
    devices = instance.num_accelerators
    if stated is not None and stated > devices:
        raise InputError(f"--tp {stated}: {instance.instance_type} has {plural(devices, 'device')}")
    degrees = [n for n in (stated and [stated]) or [1, 2, 4, 8, 16] if n <= devices]
    longest = int(shape.max_positions * settings.rope_factor)
    lengths = [2**n for n in range(9, longest.bit_length()) if 2**n < longest]
    found = []
    for degree in degrees:
        if tensor_parallel_problem(shape, degree) is not None:
            continue
        setup = Setup(shape, instance, degree, dtype)
        for tokens in (*lengths, longest):
            half = max(1, tokens // 2)
            sure = memory_plan_for(setup, profile, input_tokens=tokens - 1, output_tokens=1)
            likely = memory_plan_for(setup, profile, input_tokens=half, output_tokens=tokens - half)
            found.append((setup, tokens, sure, likely))
    if not found:
        raise InputError(f"{shape.name} cannot be split over {degrees} devices")
    return found


def _plan(settings: DeploySettings, listener: Listener) -> DeploymentPlan:
    server = settings.server
    saved = settings.recommendation and load_recommendation(settings.recommendation)
    machine = saved.best.instance if saved else str(settings.instance)
    instance = find_instance(machine)
    in_pods = server.is_kubernetes and (saved or " x " not in machine)
    if not (in_pods or instance.instance_type.startswith("ml.")):
        raise InputError(
            f"SageMaker puts a copy on one machine whose name begins with ml., not on {machine}: "
            "take such a one, or --platform kubernetes with a plan of recommend --hosts"
        )
    _, image = choose_image(server, instance)
    profile = profile_of(image, server.kind)
    if settings.profile is not None:
        profile = find_profile(settings.profile)
    elif saved and saved.answer.question.calibrated and saved.profile_document:
        measured = profile_from_json(json.dumps(saved.profile_document))
        profile = measured if measured.name == profile.name else profile
    listener.note(f"memory as in the profile {profile.label}; --profile names another")
    stated, weights = settings.stated, server.model_data_uri or server.model_id
    if stated.max_input_tokens and server.kind != "tgi" and (image is None or image.family != "trtllm"):
        raise InputError(f"--max-input-tokens: {server.kind} limits prompt and answer together: use --max-model-len")
    if saved:
        for text in saved.answer.caveats:
            listener.note(f"in the recommendation {text}")
        return plan_from_recommendation(saved.answer, saved.model, profile, stated, image=image, weights=weights)
    model = str(settings.model)
    if stated.goal == "latency" and stated.tensor_parallel is None:
        degree = _fastest_degree(settings, profile, instance)
        stated = replace(stated, tensor_parallel=degree)
        listener.note(f"TP {degree or 'of the smallest copy'}: fastest for one request at a time")
    return plan_from_layout(model, machine, profile, stated, image=image, weights=weights)


def _fastest_degree(settings: DeploySettings, profile: EngineProfile, machine: Instance) -> int | None:
    """The degree that `recommend --objective latency` takes; None: the smallest that fits."""
    lone = planned_workload(str(settings.model), settings.stated.dtype, _LONE_TOKENS, _LONE_TOKENS)
    request = RecommendRequest(lone, profile, LONE_REQUEST, objective="latency", instances=(machine,))
    best = rank(request, intervals=False).recommended
    return None if best is None else best.tensor_parallel


def _check_licence(plan: DeploymentPlan, endpoint: EndpointSettings) -> None:
    """Raises InputError if a licence must be accepted first, as for Meta's models."""
    name = plan.setup.shape.name  # a folder's licence was accepted at download
    licensed = (each for each in all_model_entries() if each.hf_id.startswith(_LICENSED))
    if name in (each.shape.name for each in licensed) and not endpoint.accept_eula:
        raise InputError(f"{name} has a licence of its own: read it, then add --accept-eula")
