"""`lmi-bench convert`: PyTorch's pickled weights into safetensors."""

from __future__ import annotations

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.convert import ConvertSettings


@spread_options
def convert(settings: ConvertSettings) -> None:
    """Copy a model folder, with safetensors instead of .bin files: the engine reads nothing else.

    torch's restricted unpickler reads the pickle: it loads tensors and runs no code. The weights
    of both folders are hashed and compared.
    """
    from lmi_bench.cli.console import say, terminal
    from lmi_bench.jobs.convert import convert as run

    with terminal() as listener:
        converted = run(settings, listener)
    say(f"{converted.folder}: the same weights, sha256 {converted.sha256}")
