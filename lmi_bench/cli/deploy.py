"""`lmi-bench deploy`: configurations for servers that others run, written, read and checked."""

from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.cli.command import spread_options
from lmi_bench.cli.console import note, print_table, run_job, say, warn
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import EXIT_FAILED, InputError
from lmi_bench.core.option import Option
from lmi_bench.core.units import bytes_to_gib, format_figure, s_to_ms
from lmi_bench.deploy.loadgen import SECRET_COMMAND, Loadgen
from lmi_bench.jobs.settings import deploy as settings_of
from lmi_bench.jobs.settings import planning

deploy = typer.Typer(
    name="deploy",
    help="Write and check configurations for LMI, TGI and vLLM; nothing is sent anywhere.",
    no_args_is_help=True,
)
_Model = Annotated[str, planning.MODEL]
_Instance = Annotated[str, settings_of.INSTANCE]
_Version = Annotated[str, Option("Version of djl-serving or LMI, such as 0.26.0 or lmi28.")]


@deploy.command()
@spread_options
def write(settings: settings_of.DeploySettings) -> None:
    """Write the files of a recommended or a stated layout, checked: serving.properties or the
    variables, SageMaker's requests, a CloudFormation template and a boto3 script.
    """
    from lmi_bench.jobs.deploy import write_deployment

    plan, bundle = run_job(write_deployment, settings)
    say(plan.describe())
    say(plan.basis)
    say(f"image {bundle.image}")
    if settings.server.is_kubernetes:
        say(f"copies: {plan.instances * plan.copies}, a pod each")
    elif bundle.has_components:
        say(f"copies: {plan.copies} inference components a machine")
    elif plan.copies > 1:
        say(f"copies: LMI starts {plan.copies} workers in one container, behind one queue")
    if bundle.quota:
        say(f"quota of the account: {bundle.quota}")
    endpoint = settings.endpoint
    if endpoint.max_instances is not None:
        target = plan.scaling_target(endpoint.target_per_copy, endpoint.max_instances)
        say(
            f"autoscaling: {plan.instances} to {endpoint.max_instances} machines, at "
            f"{target:.1f} requests at once in a copy"
        )
    warn(*bundle.traps)
    say(f"{settings.out}: {', '.join(bundle.files)}")


@deploy.command()
@spread_options
def loadgen(settings: Loadgen, out: Annotated[Path, Option("YAML file.", ("--out", "-o"))]) -> None:
    """Write a load generator for Kubernetes: a sweep, and an Indexed Job of pods that send for it.

    Workers and sweep know each other by a secret that the file does not hold.
    """
    write_text(out, settings.manifest())
    say(f"{out}: a sweep and {settings.workers} workers, which need once:")
    say(SECRET_COMMAND)


@deploy.command()
@spread_options
def check(
    path: Annotated[
        Path | None,
        Option(
            "serving.properties, a server's .env file, the folder of one, or a model.tar.gz.",
            argument=True,
            metavar="[PATH]",
        ),
    ] = None,
    djl_version: _Version = "0.38.0",
    allow: Annotated[
        list[str] | None, Option("Name that may pass unknown, such as a new argument; repeatable.")
    ] = None,
) -> None:
    """Print how a container reads a file, LMI's with this environment; exit 2 for a mistake."""
    from lmi_bench.deploy.option_table import all_options
    from lmi_bench.jobs.deploy import check_file

    server, settings, traps = check_file(path, djl_version, tuple(allow or ()))
    known = all_options()
    print_table(
        f"Effective settings of {server}",
        [
            {
                "key": name,
                "value": setting.value,
                "from": setting.origin,
                "meaning": known[name].meaning if name in known else "",
            }
            for name, setting in settings.items()
        ],
        left=("key", "value", "from", "meaning"),
    )
    warn(*traps)


@deploy.command()
@spread_options
def options(
    name: Annotated[str | None, Option("Name of one option.", argument=True)] = None,
    backend: Annotated[
        str | None,
        Option("Backend whose options are listed: vllm, lmi-dist, trtllm, tnx, deepspeed, accelerate.", default="all"),
    ] = None,
) -> None:
    """List the options of LMI: name, kind, default, backends, versions, variable."""
    from lmi_bench.deploy.option_table import ERAS, all_options, find_option, variable_of

    def versions(eras: str) -> str:
        return "all versions" if eras == "ABC" else ", ".join(ERAS[era] for era in eras)

    if name is not None:
        option = find_option(name)
        say(f"{option.name}: {option.meaning}")
        kind = option.kind if not option.choices else f"one of {', '.join(option.choices)}"
        say(f"  {kind.replace('_', ' ')}, default {option.default or 'none'}")
        say(f"  read by {', '.join(option.backends)}; {versions(option.eras)}")
        variables = [variable_of(option.name), option.environment]
        say(f"  in the environment: {', '.join(filter(None, variables))}")
        return
    known = sorted({b for option in all_options().values() for b in option.backends})
    if backend is not None and backend not in known:
        raise InputError(f"--backend {backend}: use one of {', '.join(known)}")
    rows = [
        {
            "option": option.name,
            "kind": option.kind.replace("_", " "),
            "default": option.default,
            "backends": ", ".join(option.backends),
            "djl-serving": versions(option.eras),
            "variable": option.environment or variable_of(option.name),
        }
        for option in all_options().values()
        if backend is None or {backend, "all"} & {*option.backends}
    ]
    print_table("Options of LMI; a file beats the environment", rows, left=tuple(rows[0]))


@deploy.command()
@spread_options
def backends(model: _Model, instance: _Instance, djl_version: _Version = "0.38.0") -> None:
    """Choose a backend for a model on a machine, with the reason for each."""
    from lmi_bench.catalog.instances import find_instance
    from lmi_bench.catalog.models import find_model
    from lmi_bench.deploy import backend_choice as choice
    from lmi_bench.deploy.checks import container_of
    from lmi_bench.deploy.option_table import ERAS

    shape, machine = find_model(model), find_instance(instance)
    era, _ = container_of(djl_version)
    verdicts = choice.choose_backend(shape, machine, era)
    columns = ("backend", "", "why", "settings")
    print_table(
        f"{shape.name} on {machine.instance_type} ({machine.num_accelerators} x "
        f"{machine.accelerator.name}), djl-serving {djl_version}",
        [dict(zip(columns, astuple(verdict), strict=True)) for verdict in verdicts],
        left=columns,
    )
    titles = {"backend": "backend", "bundled": "real on the bundled engine", "device": "needs the device"}
    rows = [{title: row[key] for key, title in titles.items()} for row in choice.EFFECTS]
    print_table("What `serve --serving-properties` does under these names", rows, left=tuple(rows[0]))
    if verdicts[0].verdict == choice.CHOSEN:
        say(f"chosen: {verdicts[0].backend} ({verdicts[0].settings})")
    say(f"option.rolling_batch=auto is {choice.auto_resolves_to(machine, era)} ({ERAS[era]})")
    say(choice.degree_note(shape, machine))
    if era == "A":
        new = ", ".join(choice.TENSORRT_JIT_0_26)
        say(f"TensorRT-LLM 0.26 compiles at start-up, new: {new}")
    say("source: djl-serving's LmiConfigRecommender, validators and release notes, 0.26 to 0.36")


@deploy.command()
@spread_options
def limits(settings: settings_of.LimitsSettings) -> None:
    """Print how many sequences fit at once, by token limit: set limits before the concurrency."""
    from lmi_bench.jobs.deploy import sequence_limits

    found = sequence_limits(settings)
    setup = found[0][0]
    trained = setup.shape.max_positions
    rows = [
        {
            "TP": each.tensor_parallel,
            "copies": (copies := setup.instance.num_accelerators // each.tensor_parallel),
            "tokens of a request": f"{tokens:,}" + (" *" if tokens > trained else ""),
            "sure to fit a copy": sure.sequences_guaranteed,
            "expected": likely.sequences_expected,
            "on the machine": sure.sequences_guaranteed * copies,
            "KV left, GiB": f"{bytes_to_gib(max(0.0, sure.kv_budget_bytes)):.1f}",
        }
        for each, tokens, sure, likely in found
    ]
    where = f"{setup.shape.name} in {setup.dtype} on {settings.instance}"
    print_table(f"Sequences at once: {where}", rows)
    say("expected: half of each request is prompt, and running ones have half of the output")
    say(
        "set the token limits first (option.max_model_len; MAX_INPUT_LENGTH, MAX_TOTAL_TOKENS), "
        "then max_rolling_batch_size from this table; what is left allows a larger "
        "max_rolling_batch_prefill_tokens"
    )
    if settings.rope_factor > 1:
        warn(
            f"* beyond the {trained:,} trained positions, by RoPE scaling "
            f"x{settings.rope_factor:g}: perplexity may rise with the length (fine-tuning on "
            "longer texts offsets part of it), and each request takes more memory, so fewer run at "
            "once. lmi-dist follows the model's config, vLLM takes option.hf_overrides, TensorRT-LLM "
            "option.rotary_scaling_type and _factor, TGI ROPE_SCALING and ROPE_FACTOR"
        )


@deploy.command()
@spread_options
def shards(
    model: _Model,
    tensor_parallel: Annotated[int, replace(planning.TENSOR_PARALLEL, group=None)],
    strategy: Annotated[
        str | None, Option("Strategy: shard-over-heads, replicated-heads or shard-over-batch.", default="all three")
    ] = None,
) -> None:
    """Print which device holds which KV heads, and its share of the cache, by strategy."""
    from lmi_bench.catalog.models import find_model
    from lmi_bench.deploy.kv_shards import STRATEGIES, shard_map

    shape = find_model(model)
    for name in STRATEGIES if strategy is None else [strategy]:
        try:
            devices = shard_map(shape, tensor_parallel, name)
        except InputError as exc:
            if strategy is not None:
                raise
            say(f"{name}: {exc}")
            continue
        rows = [
            {
                "device": number,
                "query heads": _runs(heads.query_heads) or "padding",
                "KV heads": _runs(heads.kv_heads) or "padding",
                "KV cache": f"{share:.1%}",
            }
            for number, (heads, share) in enumerate(devices)
        ]
        print_table(f"{name}: {STRATEGIES[name]}", rows)
    say(
        f"{shape.name}: {shape.num_heads} query heads, {shape.num_kv_heads} KV heads; KV cache: "
        "share of an unsplit model's, padding counted. vLLM and TGI: shard-over-heads; NeuronX and "
        "the bundled engine: option.group_query_attention (--group-query-attention)"
    )


def _runs(numbers: Sequence[int]) -> str:
    """0, 0, 1, 1, 2, 3 as `0 x2, 1 x2, 2-3`."""
    parts: list[tuple[int, int, int]] = []  # first, last, how often each
    for number in sorted(set(numbers)):
        times = list(numbers).count(number)
        if parts and parts[-1][1] == number - 1 and parts[-1][2] == times == 1:
            parts[-1] = (parts[-1][0], number, 1)
        else:
            parts.append((number, number, times))
    return ", ".join(
        (f"{first}" if first == last else f"{first}-{last}") + (f" x{times}" if times > 1 else "")
        for first, last, times in parts
    )


@deploy.command()
@spread_options
def presets(
    model: Annotated[
        str | None, Option("Model under the name that it was measured with.", ("--model", "-m"), default="all")
    ] = None,
) -> None:
    """Print measured configurations: for each model one of low cost and one of low latency."""
    from lmi_bench.jobs.fleet import measured_presets

    rows = [
        {
            "model": preset.cell.model,
            "in/out": f"{preset.cell.input_tokens}/{preset.cell.output_tokens}",
            "choose for": preset.goal,
            "machines": f"{preset.cell.replicas} x {preset.cell.instance_type}",
            "TP": preset.cell.tensor_parallel,
            "concurrency": preset.cell.concurrency,
            "tok/s": format_figure(preset.cell.throughput_tokens_per_s, 0),
            "ms/token": format_figure((each_s := preset.cell.latency_s_per_token) and s_to_ms(each_s), 0),
            "USD/1M out": format_figure(preset.usd_per_1m_output, 2),
        }
        for preset in measured_presets(model)
    ]
    left = ("model", "in/out", "choose for", "machines")
    print_table("Measured configurations (JumpStart, 2023)", rows, left=left)
    note("measured with TGI of 2023; `recommend` predicts other machines, lengths and engines")


@deploy.command()
@spread_options
def defaults(
    model: Annotated[str, replace(planning.MODEL, names=(), argument=True)],
    instance: Annotated[str, replace(settings_of.INSTANCE, argument=True)],
) -> None:
    """Print what JumpStart set for a model on a machine in 2023, as TGI's variables."""
    from lmi_bench.catalog.instances import find_instance
    from lmi_bench.catalog.models import find_model
    from lmi_bench.deploy.server_settings import jumpstart_environment

    variables = jumpstart_environment(find_model(model), find_instance(instance))
    say(*(f"{name}={value}" for name, value in variables.items()))
    say("JumpStart's rule of 2023, published for Llama 2, with this model's own context")


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

    seconds, last = wait_until_healthy(url, timeout)
    if seconds is None:
        warn(
            f"{url} was not healthy within {timeout:g} s ({last}), so SageMaker would stop "
            "it: raise container_startup_health_check_timeout, or read the container's log"
        )
        raise typer.Exit(EXIT_FAILED)
    say(f"{url} is healthy after {seconds:.1f} s")
