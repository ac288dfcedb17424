"""A load generator on Kubernetes: a sweep, and an Indexed Job of workers that dial in to it."""

import re
from dataclasses import dataclass
from typing import Any, Final

from lmi_bench.catalog.templates import as_yaml, filled
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, Settings, option
from lmi_bench.core.redaction import redact_text
from lmi_bench.deploy.settings import SECRET

SECRET_COMMAND: Final = (
    f"openssl rand -hex 16 | kubectl create secret generic {SECRET} --from-file=LMI_BENCH_SECRET=/dev/stdin"
)
_PORT: Final = 7711
_NAMES: Final = ("service", "claim", "sweep", "workers")
_OWN: Final = ("--hosts", "--ray", "--listen", "--workers", "--out", "--resume", "--api-key", "--header")
_MANY: Final = ("--against", "--matrix")  # sweeps, of which the pods of the workers serve one
_SHORT: Final = ("-o", "-H")  # whose value may follow at once
_NAME: Final = re.compile("[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # with `-workers` a Service's


@dataclass(frozen=True, slots=True)
class Loadgen(Settings):
    """What to write. Raises InputError for arguments that the file states, or that are secrets.

    sweep  Arguments of the sweep, after --: its target and load.
    image  Image with lmi-bench of this version.
    workers  Number of sending pods.
    name  Name of the objects.
    """

    sweep: tuple[str, ...] = option(value=REQUIRED, argument=True, metavar="-- SWEEP...")
    image: str = option(value=REQUIRED)
    workers: int = option(value=4, must="at least 1")
    name: str = option(value="loadgen")

    def _check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(f"--name {self.name!r}: use a to z, 0 to 9 and hyphens, at most 40")
        for argument in self.sweep:
            name = argument[:2] if argument[:2] in _SHORT else argument.partition("=")[0]
            if name in (*_OWN, *_MANY, *_SHORT) or redact_text(argument) != argument:
                raise InputError(
                    f"{redact_text(name)}: leave it out. The file states where the workers and the "
                    "run are, and holds one sweep; a key is not written into files, but taken from the Secret "
                    f"{SECRET}"
                )

    def manifest(self) -> str:
        """The file for `kubectl apply`."""
        join = ("--hosts", f"join*{self.workers}", "--listen", f"[::]:{_PORT}")  # IPv4, too
        run = (*join, "--out", "/runs/run", "--resume")
        values: dict[str, Any] = {
            "name": self.name,
            "workers_name": f"{self.name}-workers",
            "image": self.image,
            "workers": self.workers,
            "secret": SECRET,
            "sweep_command": ["lmi-bench", "sweep", *self.sweep, *run],
            "worker_command": ["lmi-bench", "worker", "--connect", f"{self.name}:{_PORT}"],
        }
        return as_yaml(*filled("deploy/loadgen.yaml", _NAMES, values).values())
