"""The commands before a first sweep: doctor."""

from __future__ import annotations

import typer

from lmi_bench.cli.command import JsonFile, spread_options
from lmi_bench.cli.console import print_table, run_job, say, write_json
from lmi_bench.jobs.settings.setup import DoctorSettings


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
