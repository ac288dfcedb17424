"""The tables of `deploy`: options, backends, limits, defaults, images."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_bench.analysis.fleet.presets import Preset
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import bytes_to_gib, format_figure, s_to_ms
from lmi_bench.deploy.backend_choice import (
    CHOSEN,
    TENSORRT_JIT_0_26,
    auto_resolves_to,
    choose_backend,
    degree_note,
)
from lmi_bench.deploy.checks import container_of
from lmi_bench.deploy.images import all_images
from lmi_bench.deploy.jumpstart import jumpstart_environment, provenance
from lmi_bench.deploy.kv_shards import STRATEGIES, shard_map
from lmi_bench.deploy.option_table import ERAS, all_options, find_option
from lmi_bench.jobs.deploy import CheckedFile, SequenceLimits

_ROPE_BACKENDS = (
    "lmi-dist follows the model's config, vLLM takes option.hf_overrides, TensorRT-LLM "
    "option.rotary_scaling_type and _factor, TGI ROPE_SCALING and ROPE_FACTOR"
)


def print_options(name: str | None, backend: str | None) -> None:
    """The table of options, or one of them in full."""
    if name is not None:
        option = find_option(name)
        say(f"{option.name}: {option.meaning}")
        kind = option.kind if not option.choices else f"one of {', '.join(option.choices)}"
        say(f"  {kind.replace('_', ' ')}, default {option.default or 'none'}")
        say(f"  read by {', '.join(option.backends)}; {_versions(option.eras)}")
        variables = [option.variable, option.environment]
        say(f"  in the environment: {', '.join(filter(None, variables))}")
        return
    known = sorted({b for option in all_options().values() for b in option.backends})
    if backend is not None and backend not in known:
        raise InputError(f"--backend {backend}: use one of {', '.join(known)}")
    print_table(
        "Options of LMI; a file beats the environment",
        [
            {
                "option": option.name,
                "kind": option.kind.replace("_", " "),
                "default": option.default,
                "backends": ", ".join(option.backends),
                "djl-serving": _versions(option.eras),
                "variable": option.environment or option.variable,
            }
            for option in all_options().values()
            if backend is None or {backend, "all"} & {*option.backends}
        ],
        left=("option", "kind", "default", "backends", "djl-serving", "variable"),
    )


def print_backends(model: str, instance_name: str, djl_version: str) -> None:
    """The decision table for a model on a machine."""
    shape, instance = find_model(model), find_instance(instance_name)
    era, _ = container_of(djl_version)
    verdicts = choose_backend(shape, instance, era)
    print_table(
        f"{shape.name} on {instance.instance_type} ({instance.num_accelerators} x "
        f"{instance.accelerator.name}), djl-serving {djl_version}",
        [
            {
                "backend": verdict.backend,
                "": verdict.verdict,
                "why": verdict.reason,
                "settings": verdict.settings,
            }
            for verdict in verdicts
        ],
        left=("backend", "", "why", "settings"),
    )
    if verdicts[0].verdict == CHOSEN:
        say(f"chosen: {verdicts[0].backend} ({verdicts[0].settings})")
    say(f"option.rolling_batch=auto is {auto_resolves_to(instance, era)} ({ERAS[era]})")
    say(degree_note(shape, instance))
    if era == "A":
        say(f"TensorRT-LLM 0.26 compiles at start-up, new: {', '.join(TENSORRT_JIT_0_26)}")
    say("source: djl-serving's LmiConfigRecommender, validators and release notes, 0.26 to 0.36")


def print_limits(found: SequenceLimits, rope_factor: float) -> None:
    """Sequences at once by token limit and degree, and what longer positions cost."""
    shape, trained = found.shape, found.shape.max_positions
    rows = [
        {
            "TP": each.tensor_parallel,
            "copies": each.copies,
            "tokens of a request": f"{each.tokens:,}" + (" *" if each.tokens > trained else ""),
            "sure to fit a copy": each.guaranteed,
            "expected": each.expected,
            "on the machine": each.guaranteed * each.copies,
            "KV left, GiB": f"{bytes_to_gib(each.kv_left_bytes):.1f}",
        }
        for each in found.limits
    ]
    machine = found.instance.instance_type
    print_table(f"Sequences at once: {shape.name} in {found.dtype} on {machine}", rows)
    say("expected: half of each request is prompt, and running ones have half of the output")
    say(
        "set the token limits first (option.max_model_len; MAX_INPUT_LENGTH, MAX_TOTAL_TOKENS), "
        "then max_rolling_batch_size from this table; what is left allows a larger "
        "max_rolling_batch_prefill_tokens"
    )
    if rope_factor > 1:
        warn(
            f"* beyond the {trained:,} trained positions, by RoPE scaling x{rope_factor:g}: "
            "perplexity may rise with the length (fine-tuning on longer texts offsets part of it), "
            f"and each request takes more memory, so fewer run at once. {_ROPE_BACKENDS}"
        )


def print_check(checked: CheckedFile, djl_version: str) -> None:
    """The effective settings, each with its source, and the traps."""
    options = all_options()
    print_table(
        f"Effective settings of djl-serving {djl_version}",
        [
            {
                "key": name,
                "value": setting.value,
                "from": setting.origin,
                "meaning": options[name].meaning if name in options else "not an option of LMI",
            }
            for name, setting in checked.settings.items()
        ],
        left=("key", "value", "from", "meaning"),
    )
    for name in checked.untranslated:
        warn(f"{name} is set, but LMI containers do not read it; option.max_model_len is theirs")
    for trap in checked.traps:
        warn(trap)


def print_shards(model: str, degree: int, strategy: str | None) -> None:
    """Heads and share of the cache of each device, a table for each strategy."""
    shape = find_model(model)
    for name in STRATEGIES if strategy is None else [strategy]:
        rows = [
            {
                "device": number,
                "query heads": _runs(device.query_heads),
                "KV heads": _runs(device.kv_heads),
                "KV cache": f"{device.cache_share:.1%}",
            }
            for number, device in enumerate(shard_map(shape, degree, name))
        ]
        print_table(f"{name}: {STRATEGIES[name]}", rows)
    say(
        f"{shape.name}: {shape.num_heads} query heads, {shape.num_kv_heads} KV heads; KV cache: "
        "share of an unsplit model's. The bundled engine, vLLM and TGI: shard-over-heads; NeuronX: "
        "option.group_query_attention"
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


def print_defaults(model: str, instance_name: str) -> None:
    """JumpStart's variables."""
    shape, instance = find_model(model), find_instance(instance_name)
    for name, value in jumpstart_environment(shape, instance).items():
        say(f"{name}={value}")
    say(provenance(shape))


def print_images(family: str | None, region: str, account: str | None) -> None:
    """The table of images that SageMaker can run."""
    families = sorted({image.family for image in all_images()})
    if family is not None and family not in families:
        raise InputError(f"no images of {family!r} are known; known: {', '.join(families)}")
    print_table(
        "Images; pin the tag, several share one version",
        [
            {
                "family": image.family,
                "engine": f"{image.engine} {image.engine_version}".rstrip(),
                "needs": "Neuron devices"
                if image.accelerator == "neuron"
                else f"{image.cuda}, compute capability {image.compute_capability}, {image.arch}",
                "address": image.uri(region, account),
            }
            for image in all_images()
            if family in (None, image.family) and (account or image.is_in(region))
        ],
        left=("family", "engine", "needs", "address"),
    )


def print_presets(found: Sequence[Preset]) -> None:
    """Measured serving configurations as a table."""
    rows = [
        {
            "model": preset.cell.model,
            "in/out": f"{preset.cell.input_tokens}/{preset.cell.output_tokens}",
            "choose for": preset.goal,
            "machines": f"{preset.cell.replicas} x {preset.cell.instance_type}",
            "TP": preset.cell.tensor_parallel,
            "concurrency": preset.cell.concurrency,
            "tok/s": format_figure(preset.cell.throughput_tokens_per_s, 0),
            "ms/token": format_figure(
                (each_s := preset.cell.latency_s_per_token) and s_to_ms(each_s), 0
            ),
            "USD/1M out": format_figure(preset.usd_per_1m_output, 2),
        }
        for preset in found
    ]
    left = ("model", "in/out", "choose for", "machines")
    print_table("Measured configurations (JumpStart, 2023)", rows, left=left)
    note("measured with TGI of 2023; `recommend` predicts other machines, lengths and engines")


def _versions(eras: str) -> str:
    return "all versions" if eras == "ABC" else ", ".join(ERAS[era] for era in eras)
