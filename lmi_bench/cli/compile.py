"""`lmi-bench compile`: decode steps compiled ahead of time, for `--artefact`."""

from __future__ import annotations

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.compile import CompileSettings


@spread_options
def compile_steps(settings: CompileSettings) -> None:
    """Compile a model's decode steps (torch.export, AOTInductor) and compare them with eager ones.

    `serve`, `sweep` and `generate` take the folder with --artefact and start without compiling.
    It fits one model shape, number formats, quantization, --tp, --block-size, kind of processor or
    GPU, and version of torch, but any weights. A step between two shapes is padded to the larger
    one; larger steps, and prompts, run as they do without it.
    """
    from lmi_bench.cli.console import print_table, say, terminal
    from lmi_bench.jobs.compile import compile_steps as run

    with terminal() as listener:
        compiled = run(settings, listener)
    rows = [
        {
            "sequences": f"{each.shape.sequences}",
            "context tokens": f"{each.shape.context_tokens:,}",
            "largest logit difference": f"{each.largest:.2g}",
            "of logits' spread": f"{each.largest / each.spread:.1%}" if each.spread else "",
            "same likeliest token": f"{each.same_frac:.0%}",
        }
        for each in compiled.differences
    ]
    print_table("Compiled steps against eager ones, random contexts", rows)
    say(f"compiled steps: {compiled.folder}   use them with: --artefact {compiled.folder}")
