"""The commands before a first sweep: doctor, init."""

from __future__ import annotations

import sys

import typer

from lmi_bench.cli.command import JsonFile, spread_options
from lmi_bench.cli.console import note, print_table, run_job, say, terminal, write_json
from lmi_bench.core.errors import EXIT_INTERRUPTED
from lmi_bench.jobs.settings.setup import DoctorSettings, InitSettings


@spread_options
def doctor(settings: DoctorSettings, json_file: JsonFile = None) -> None:
    """Examine this machine, its software and settings: what limits or spoils a measurement.

    Nothing is changed, and AWS is not asked. Exit 1 if something fails.
    """
    from lmi_bench.jobs.doctor import doctor as run

    diagnosis = run_job(run, settings)
    rows = [
        {
            "": each.state,
            "check": each.check,
            "found, and what to mend": f"{each.found}. {each.mend}".removesuffix(" "),
        }
        for each in diagnosis.findings
    ]
    print_table("Doctor", rows, whole=("", "check"), left=("found, and what to mend",))
    counts = {state: diagnosis.count(state) for state in ("ok", "warn", "fail")}
    say(f"doctor: {', '.join(f'{number} {state}' for state, number in counts.items())}")
    write_json(json_file, diagnosis.to_json(), "findings")
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)


@spread_options
def init(settings: InitSettings) -> None:
    """Write a scenario file by a few questions; options answer them beforehand.

    A key is never written into the file: `sweep` takes it from LMI_BENCH_API_KEY.
    """
    from lmi_bench.jobs.init import init as run

    try:
        with terminal() as listener:
            written = run(settings, listener, _ask if sys.stdin.isatty() else None)
    except (KeyboardInterrupt, EOFError):
        note("\ninterrupted: nothing was written")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    say(f"scenario: {written.file}")
    say("next:")
    say(f"  {written.command}")


def _ask(question: str, default: str) -> str:
    return input(f"{question} [{default}]: ") or default
