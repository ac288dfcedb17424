"""`lmi-bench deploy`: configurations for servers that others run, written, read and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

deploy = typer.Typer(
    name="deploy",
    help="Write and check configurations for LMI, TGI and vLLM; nothing is sent anywhere.",
    no_args_is_help=True,
)
_VERSION_HELP = "djl-serving's version, such as 0.26.0."
_LAYOUT, _SERVER, _ENDPOINT = "Layout", "Server", "SageMaker endpoint"
_PLACEHOLDER_ROLE = "arn:aws:iam::111122223333:role/replace-me"


@deploy.command()
def write(
    recommendation: Annotated[
        Path | None,
        typer.Argument(metavar="[REC.json]", help="What `recommend --json` wrote."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder.")] = Path("deployment"),
    server: Annotated[str, typer.Option(help="lmi, tgi or vllm.", rich_help_panel=_SERVER)] = "lmi",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A catalog name or folder.", rich_help_panel=_LAYOUT),
    ] = None,
    instance: Annotated[
        str | None, typer.Option(help="Such as ml.g5.12xlarge.", rich_help_panel=_LAYOUT)
    ] = None,
    instances: Annotated[int, typer.Option(help="Machines.", rich_help_panel=_LAYOUT)] = 1,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tp", help="Degree. (default: the smallest that fits)", rich_help_panel=_LAYOUT
        ),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option(
            help="Of the model on a machine. (default: all that fit)", rich_help_panel=_LAYOUT
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float16, bfloat16, float32, float8, or int4 (a quantized checkpoint). (default: "
            "the checkpoint's, at most 16 bits)",
            rich_help_panel=_LAYOUT,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a request, both ways. (default: all positions)",
            rich_help_panel=_LAYOUT,
        ),
    ] = None,
    max_input_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt.", rich_help_panel=_LAYOUT)
    ] = None,
    max_rolling_batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences at once. (default: from memory)", rich_help_panel=_LAYOUT),
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            help="throughput, or latency: one request at a time.", rich_help_panel=_LAYOUT
        ),
    ] = "throughput",
    draft: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: ngram, or Hub id, s3:// prefix or folder of a smaller "
            "model. (default: as recommended)",
            rich_help_panel=_LAYOUT,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Engine profile for memory shares.", rich_help_panel=_LAYOUT),
    ] = None,
    model_id: Annotated[
        str | None,
        typer.Option(
            help="Hub id, s3:// prefix or folder. (default: the catalog's Hub id)",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    model_data: Annotated[
        str | None,
        typer.Option(
            help="s3:// prefix or model.tar.gz that SageMaker mounts at /opt/ml/model.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="LMI: a version (0.36.0, lmi28, a tag). TGI: the address.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Let the server run code that comes with the weights.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    accept_eula: Annotated[
        bool,
        typer.Option(
            "--accept-eula", help="You have read the model's licence.", rich_help_panel=_SERVER
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Of the endpoint.", rich_help_panel=_ENDPOINT)
    ] = None,
    role_arn: Annotated[
        str, typer.Option(help="SageMaker's role.", rich_help_panel=_ENDPOINT)
    ] = _PLACEHOLDER_ROLE,
    region: Annotated[str, typer.Option(help="Region.", rich_help_panel=_ENDPOINT)] = "us-east-1",
    account: Annotated[
        str | None,
        typer.Option(help="Of the region's image registry.", rich_help_panel=_ENDPOINT),
    ] = None,
    startup_timeout: Annotated[
        int,
        typer.Option(
            help="Seconds to load, and to become healthy; 60 to 3600.", rich_help_panel=_ENDPOINT
        ),
    ] = 1200,
    max_instances: Annotated[
        int | None, typer.Option(help="Autoscale up to so many.", rich_help_panel=_ENDPOINT)
    ] = None,
    target_concurrency: Annotated[
        float | None,
        typer.Option(
            help="Requests of one copy that autoscaling holds.", rich_help_panel=_ENDPOINT
        ),
    ] = None,
    components: Annotated[
        bool,
        typer.Option(
            "--components",
            help="An inference component for each copy in any case.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = False,
) -> None:
    """Write the files of a recommended or a stated layout, checked: serving.properties or the
    variables, SageMaker's requests, a CloudFormation template and a boto3 script.
    """
    from lmi_bench.deploy.bundle import Target
    from lmi_bench.deploy.images import ACCOUNT
    from lmi_bench.deploy.sagemaker import Wishes
    from lmi_bench.jobs.deploy import Layout, write_deployment

    layout = Layout(
        model=model,
        instance=instance,
        instances=instances,
        tensor_parallel=tensor_parallel,
        copies=copies,
        dtype=dtype,
        max_model_len=max_model_len,
        max_input_tokens=max_input_tokens,
        slots=max_rolling_batch_size,
        model_id=model_id,
        profile=profile,
        goal=goal,
        draft=draft,
    )
    target = Target(
        server=server,
        region=region,
        image=image,
        account=account or ACCOUNT,
        model_data_uri=model_data,
        trust_remote_code=trust_remote_code,
    )
    wishes = Wishes(
        name=name or "lmi-bench",
        role_arn=role_arn,
        startup_s=startup_timeout,
        max_instances=max_instances,
        target_per_copy=target_concurrency,
        components=components,
        accept_eula=accept_eula,
    )
    write_deployment(recommendation, layout, target, wishes, out)


@deploy.command()
def check(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[PATH]", help="serving.properties, its folder, or a model.tar.gz."),
    ] = None,
    djl_version: Annotated[str, typer.Option(help=_VERSION_HELP)] = "0.36.0",
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A name that may pass unknown, such as a new argument; repeatable."),
    ] = None,
) -> None:
    """Say what an LMI container would make of a file and of this environment; exit 2 if it would
    refuse them.
    """
    from lmi_bench.jobs.deploy import check_file

    check_file(path, djl_version, tuple(allow or ()))


@deploy.command()
def options(
    name: Annotated[str | None, typer.Argument(help="One option.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Those of one: vllm, lmi-dist, trtllm, tnx, deepspeed, accelerate."),
    ] = None,
) -> None:
    """List the options of LMI: name, kind, default, backends, versions, variable."""
    from lmi_bench.cli.deploy_tables import print_options

    print_options(name, backend)


@deploy.command()
def backends(
    model: Annotated[str, typer.Option("--model", "-m", help="A catalog name or folder.")],
    instance: Annotated[str, typer.Option(help="Such as ml.g5.12xlarge.")],
    djl_version: Annotated[str, typer.Option(help=_VERSION_HELP)] = "0.36.0",
) -> None:
    """Choose a backend for a model on a machine, with the reason for each."""
    from lmi_bench.cli.deploy_tables import print_backends

    print_backends(model, instance, djl_version)


@deploy.command()
def limits(
    model: Annotated[str, typer.Option("--model", "-m", help="A catalog name or folder.")],
    instance: Annotated[str, typer.Option(help="Such as ml.g5.12xlarge.")],
    tensor_parallel: Annotated[
        int | None, typer.Option("--tp", help="One degree. (default: all possible)")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights. (default: the checkpoint's, at most 16 bits)"),
    ] = None,
    rope_factor: Annotated[
        float, typer.Option(help="Extend the trained positions so many times by RoPE scaling.")
    ] = 1.0,
    profile: Annotated[str | None, typer.Option(help="Engine profile.")] = None,
) -> None:
    """How many sequences fit at once, by token limit: set the limits before the concurrency."""
    from lmi_bench.cli.deploy_tables import print_limits

    print_limits(model, instance, tensor_parallel, dtype, rope_factor, profile)


@deploy.command()
def shards(
    model: Annotated[str, typer.Option("--model", "-m", help="A catalog name or folder.")],
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="Devices.")],
    strategy: Annotated[
        str | None,
        typer.Option(
            help="shard-over-heads, replicated-heads or shard-over-batch. (default: all three)"
        ),
    ] = None,
) -> None:
    """Which device keeps which KV heads, and how much of the cache, by strategy."""
    from lmi_bench.cli.deploy_tables import print_shards

    print_shards(model, tensor_parallel, strategy)


@deploy.command()
def presets(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As measured. (default: all)")
    ] = None,
) -> None:
    """Measured configurations: for each model one for lower cost, one for lower latency."""
    from lmi_bench.cli.deploy_tables import print_presets
    from lmi_bench.jobs.accelerators import measured_presets

    print_presets(measured_presets(model))


@deploy.command()
def defaults(
    model: Annotated[str, typer.Argument(help="A catalog name or folder.")],
    instance: Annotated[str, typer.Argument(help="Such as ml.g5.12xlarge.")],
) -> None:
    """What JumpStart set for a model on a machine in 2023, as TGI's variables."""
    from lmi_bench.cli.deploy_tables import print_defaults

    print_defaults(model, instance)


@deploy.command()
def images(
    region: Annotated[str, typer.Option(help="Region.")] = "us-east-1",
    account: Annotated[str | None, typer.Option(help="Of the region's image registry.")] = None,
) -> None:
    """List the container images that can be pinned."""
    from lmi_bench.cli.deploy_tables import print_images

    print_images(region, account)


@deploy.command()
def package(
    folder: Annotated[Path, typer.Argument(help="Folder with a serving.properties.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New archive.")] = Path("model.tar.gz"),
) -> None:
    """Pack serving.properties, model.py and requirements.txt at the root of a model.tar.gz."""
    from lmi_bench.jobs.deploy import pack

    pack(folder, out)


@deploy.command()
def probe(
    url: Annotated[str, typer.Argument(help="A server, such as http://127.0.0.1:8080.")],
    timeout: Annotated[float, typer.Option(help="Seconds until it has to be healthy.")] = 1800.0,
) -> None:
    """Wait until a container answers /ping with 200, as SageMaker does; exit 1 at the deadline."""
    from lmi_bench.jobs.deploy import wait_until_healthy

    raise typer.Exit(wait_until_healthy(url, timeout))
