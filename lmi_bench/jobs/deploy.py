"""Deployment files: from a recommendation or a stated layout to a folder, and back."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lmi_bench.catalog.models import find_model_entry
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.core.errors import EXIT_DONE, EXIT_FAILED, InputError
from lmi_bench.deploy.bundle import Target, build_bundle, pack_model, write_bundle
from lmi_bench.deploy.checks import check_settings, era_of
from lmi_bench.deploy.environment import effective_settings, untranslated_variables
from lmi_bench.deploy.option_table import all_options
from lmi_bench.deploy.plan import DeploymentPlan, plan_from_layout, plan_from_recommendation
from lmi_bench.deploy.sagemaker import Wishes, needs_components
from lmi_bench.deploy.server_settings import SERVERS
from lmi_bench.jobs.saved_recommendation import load_recommendation
from lmi_bench.jobs.serving_file import load_properties
from lmi_bench.targets.profiles import find_profile
from lmi_bench.targets.sagemaker_draft import refuse_sagemaker_draft

_GATED: Final = "meta-llama/"
_PROBE_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout flags; None is what was left out."""

    model: str | None
    instance: str | None
    instances: int
    tensor_parallel: int | None
    copies: int | None
    dtype: str | None
    max_model_len: int | None
    max_input_tokens: int | None
    slots: int | None
    model_id: str | None
    profile: str | None
    goal: str = "throughput"
    draft: str | None = None


def write_deployment(
    recommendation: Path | None, layout: Layout, target: Target, wishes: Wishes, out: Path
) -> None:
    """Write a folder and say what is in it. Raises InputError before anything is written."""
    if target.server not in SERVERS:
        raise InputError(f"--server {target.server}: use one of {', '.join(SERVERS)}")
    refuse_sagemaker_draft(layout.draft, _against_sagemaker_draft(layout, target, wishes))
    plan = _plan(recommendation, layout)
    _check_licence(plan, wishes)
    bundle = build_bundle(plan, target, wishes)
    write_bundle(bundle, out)
    say(plan.describe())
    say(plan.basis)
    if bundle.image is not None:
        say(f"image {bundle.image}")
        one_copy = target.server == "tgi"
        if wishes.components or needs_components(plan, one_copy_a_container=one_copy):
            say(f"copies: {plan.copies} inference components a machine")
        elif plan.copies > 1:
            say(f"copies: LMI starts {plan.copies} workers in one container, behind one queue")
    for trap in bundle.traps:
        warn(trap)
    say(f"{out}: {', '.join(bundle.files)}")


def check_file(path: Path | None, djl_version: str, allowed: tuple[str, ...]) -> None:
    """Print the effective settings and the traps. Raises InputError for mistakes."""
    source = "the environment" if path is None else str(path)
    properties = {} if path is None else load_properties(path)
    environ = dict(os.environ)
    settings = effective_settings(properties, environ, source=source)
    if not settings:
        raise InputError("nothing to check: give a serving.properties, or set OPTION_ variables")
    verdict = check_settings(
        {name: setting.value for name, setting in settings.items()},
        era=era_of(djl_version),
        allowed=allowed,
    )
    verdict.raise_mistakes(source)
    options = all_options()
    print_table(
        f"What djl-serving {djl_version} goes by",
        [
            {
                "key": name,
                "value": setting.value,
                "from": setting.origin,
                "meaning": options[name].meaning if name in options else "passed on to the engine",
            }
            for name, setting in settings.items()
        ],
        left=("key", "value", "from", "meaning"),
    )
    for name in untranslated_variables(environ):
        warn(f"{name} is set, but LMI containers do not read it; option.max_model_len is theirs")
    for trap in verdict.traps:
        warn(trap)


def pack(folder: Path, archive: Path) -> None:
    """Write the archive and say what is in it."""
    names = pack_model(folder, archive)
    say(f"{archive}: {', '.join(names)}")


def wait_until_healthy(url: str, limit_s: float) -> int:
    """Ask /ping once a second until it answers 200; returns the exit code."""
    address = f"{url.rstrip('/')}/ping"
    if not address.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is no address: write one such as http://127.0.0.1:8080")
    start_s = time.monotonic()
    last = "no answer yet"
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310 - http only
                if answer.status == 200:
                    say(f"{url} is healthy after {time.monotonic() - start_s:.1f} s")
                    return EXIT_DONE
                last = f"status {answer.status}"
        except urllib.error.HTTPError as exc:
            last = f"status {exc.code}"
        except (urllib.error.URLError, OSError) as exc:
            last = str(getattr(exc, "reason", exc))
        if time.monotonic() - start_s + _PROBE_EVERY_S > limit_s:
            warn(
                f"{url} was not healthy within {limit_s:g} s ({last}): SageMaker would give it up; "
                "raise container_startup_health_check_timeout, or look at the container's log"
            )
            return EXIT_FAILED
        time.sleep(_PROBE_EVERY_S)


def _plan(recommendation: Path | None, layout: Layout) -> DeploymentPlan:
    if layout.goal not in ("throughput", "latency"):
        raise InputError(f"--goal {layout.goal}: use throughput or latency")
    if recommendation is not None:
        if layout.model is not None or layout.instance is not None:
            raise InputError("give a recommendation, or --model and --instance, not both")
        content = load_recommendation(recommendation)
        plan = plan_from_recommendation(content, model_id=layout.model_id)
        note("token limits are those of the recommended workload: longer requests are refused")
    else:
        if layout.model is None or layout.instance is None:
            raise InputError("give a file of `recommend --json`, or --model and --instance")
        plan = plan_from_layout(
            layout.model,
            layout.instance,
            find_profile(layout.profile),
            tensor_parallel=layout.tensor_parallel,
            copies=layout.copies,
            instances=layout.instances,
            dtype=layout.dtype,
            max_model_len=layout.max_model_len,
            max_input_tokens=layout.max_input_tokens,
            slots=layout.slots,
            model_id=layout.model_id,
        )
    if layout.draft is not None:
        plan = replace(plan, engine=replace(plan.engine, draft=layout.draft))
    if layout.goal == "latency":
        plan = replace(plan, slots=1, basis=f"{plan.basis}; one request at a time, for latency")
    return plan


def _against_sagemaker_draft(layout: Layout, target: Target, wishes: Wishes) -> list[str]:
    found = []
    if target.model_data_uri is not None or layout.model_id is not None:
        found.append("weights of one's own (--model-data, --model-id)")
    if wishes.components:
        found.append("inference components (--components)")
    return found


def _check_licence(plan: DeploymentPlan, wishes: Wishes) -> None:
    """Meta's models want their licence accepted; a recommendation cannot do it for anyone."""
    try:
        gated = find_model_entry(plan.shape.name).hf_id.startswith(_GATED)
    except InputError:
        return  # a folder: whoever has it has accepted
    if gated and not wishes.accept_eula:
        raise InputError(
            f"{plan.shape.name} comes under a licence of its own: read it, then add --accept-eula"
        )
