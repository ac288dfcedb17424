"""`lmi-bench deploy`: configurations for servers that others run, written, read and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.cli.command import spread_options
from lmi_bench.cli.console import heard, say, warn
from lmi_bench.core.errors import EXIT_FAILED
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.deploy import ACCOUNT, INSTANCE, REGION, DeploySettings

deploy = typer.Typer(
    name="deploy",
    help="Write and check configurations for LMI, TGI and vLLM; nothing is sent anywhere.",
    no_args_is_help=True,
)
_Model = Annotated[str, planning.MODEL]
_Instance = Annotated[str, replace(INSTANCE, group=None)]
_Region = Annotated[str, replace(REGION, group=None)]
_Account = Annotated[str | None, replace(ACCOUNT, group=None, rare=False)]
_Version = Annotated[str, Option("Version of djl-serving or LMI, such as 0.26.0 or lmi28.")]


@deploy.command()
@spread_options
def write(settings: DeploySettings) -> None:
    """Write the files of a recommended or a stated layout, checked: serving.properties or the
    variables, SageMaker's requests, a CloudFormation template and a boto3 script.
    """
    from lmi_bench.jobs.deploy import write_deployment

    deployment = heard(write_deployment, settings)
    plan, bundle = deployment.plan, deployment.bundle
    say(plan.describe())
    say(plan.basis)
    if bundle.image is not None:
        say(f"image {bundle.image}")
        if bundle.has_components:
            say(f"copies: {plan.copies} inference components a machine")
        elif plan.copies > 1:
            say(f"copies: LMI starts {plan.copies} workers in one container, behind one queue")
    for trap in bundle.traps:
        warn(trap)
    say(f"{settings.out}: {', '.join(bundle.files)}")


@deploy.command()
@spread_options
def check(
    path: Annotated[
        Path | None,
        Option(
            "serving.properties, its folder, or a model.tar.gz.", argument=True, metavar="[PATH]"
        ),
    ] = None,
    djl_version: _Version = "0.38.0",
    allow: Annotated[
        list[str] | None, Option("Name that may pass unknown, such as a new argument; repeatable.")
    ] = None,
) -> None:
    """Print how an LMI container reads a file and this environment; exit 2 if it refuses them."""
    from lmi_bench.cli.deploy_tables import print_check
    from lmi_bench.jobs.deploy import check_file

    print_check(check_file(path, djl_version, tuple(allow or ())), djl_version)


@deploy.command()
@spread_options
def options(
    name: Annotated[str | None, Option("Name of one option.", argument=True)] = None,
    backend: Annotated[
        str | None,
        Option(
            "Backend whose options are listed: vllm, lmi-dist, trtllm, tnx, deepspeed, accelerate.",
            default="all",
        ),
    ] = None,
) -> None:
    """List the options of LMI: name, kind, default, backends, versions, variable."""
    from lmi_bench.cli.deploy_tables import print_options

    print_options(name, backend)


@deploy.command()
@spread_options
def backends(model: _Model, instance: _Instance, djl_version: _Version = "0.38.0") -> None:
    """Choose a backend for a model on a machine, with the reason for each."""
    from lmi_bench.cli.deploy_tables import print_backends

    print_backends(model, instance, djl_version)


@deploy.command()
@spread_options
def limits(
    model: _Model,
    instance: _Instance,
    tensor_parallel: Annotated[
        int | None, replace(planning.TENSOR_PARALLEL, default="all possible", group=None)
    ] = None,
    dtype: Annotated[str | None, replace(planning.DTYPE, group=None)] = None,
    rope_factor: Annotated[
        float, Option("Factor by which RoPE scaling extends the trained positions.")
    ] = 1.0,
    profile: Annotated[str | None, replace(planning.PROFILE, group=None)] = None,
) -> None:
    """Print how many sequences fit at once, by token limit: set limits before the concurrency."""
    from lmi_bench.cli.deploy_tables import print_limits
    from lmi_bench.jobs.deploy import sequence_limits

    found = sequence_limits(
        model,
        instance,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        rope_factor=rope_factor,
        profile=profile,
    )
    print_limits(found, rope_factor)


@deploy.command()
@spread_options
def shards(
    model: _Model,
    tensor_parallel: Annotated[int, replace(planning.TENSOR_PARALLEL, group=None)],
    strategy: Annotated[
        str | None,
        Option(
            "Strategy: shard-over-heads, replicated-heads or shard-over-batch.", default="all three"
        ),
    ] = None,
) -> None:
    """Print which device holds which KV heads, and its share of the cache, by strategy."""
    from lmi_bench.cli.deploy_tables import print_shards

    planning.check_at_least_one(tensor_parallel=tensor_parallel)
    print_shards(model, tensor_parallel, strategy)


@deploy.command()
@spread_options
def presets(
    model: Annotated[
        str | None,
        Option("Model under the name that it was measured with.", ("--model", "-m"), default="all"),
    ] = None,
) -> None:
    """Print measured configurations: for each model one of low cost and one of low latency."""
    from lmi_bench.cli.deploy_tables import print_presets
    from lmi_bench.jobs.fleet import measured_presets

    print_presets(measured_presets(model))


@deploy.command()
@spread_options
def defaults(
    model: Annotated[str, Option("Model as a catalog name or folder.", argument=True)],
    instance: Annotated[str, Option("Machine such as ml.g5.12xlarge.", argument=True)],
) -> None:
    """Print what JumpStart set for a model on a machine in 2023, as TGI's variables."""
    from lmi_bench.cli.deploy_tables import print_defaults

    print_defaults(model, instance)


@deploy.command()
@spread_options
def images(
    family: Annotated[
        str | None, Option("Family of images, such as lmi or vllm.", argument=True, default="all")
    ] = None,
    region: _Region = "us-east-1",
    account: _Account = None,
) -> None:
    """List the published container images, and what they need."""
    from lmi_bench.cli.deploy_tables import print_images

    print_images(family, region, account)


@deploy.command()
@spread_options
def package(
    folder: Annotated[Path, Option("Folder with a serving.properties.", argument=True)],
    out: Annotated[Path, Option("New archive.", ("--out", "-o"))] = Path("model.tar.gz"),
) -> None:
    """Pack serving.properties, model.py and requirements.txt at the root of a model.tar.gz."""
    from lmi_bench.deploy.bundle import pack_model

    say(f"{out}: {', '.join(pack_model(folder, out))}")


@deploy.command()
@spread_options
def probe(
    url: Annotated[str, Option("Server, such as http://127.0.0.1:8080.", argument=True)],
    timeout: Annotated[float, Option("Time limit to become healthy in s.")] = 1800.0,
) -> None:
    """Wait until a container answers /ping with 200, as SageMaker does; exit 1 at the deadline."""
    from lmi_bench.jobs.deploy import wait_until_healthy

    health = wait_until_healthy(url, timeout)
    if health.seconds is None:
        warn(
            f"{url} was not healthy within {timeout:g} s ({health.last}), so SageMaker would stop "
            "it: raise container_startup_health_check_timeout, or read the container's log"
        )
        raise typer.Exit(EXIT_FAILED)
    say(f"{url} is healthy after {health.seconds:.1f} s")
