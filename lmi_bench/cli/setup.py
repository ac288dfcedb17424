"""The commands before a first sweep: doctor, selftest, init, catalog, explain."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lmi_bench.cli.command import JsonFile, spread_options
from lmi_bench.cli.console import note, print_table, run_job, say, warn, write_json
from lmi_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED
from lmi_bench.core.option import Option
from lmi_bench.core.units import format_figure
from lmi_bench.jobs.settings import plan
from lmi_bench.jobs.settings import setup as of_setup

if TYPE_CHECKING:
    from lmi_bench.jobs.doctor import Finding

_TABLES: Final = {
    "models": "List the models: parameters, layers, KV heads, context; the smallest first.",
    "instances": "List the instance types by accelerator: memory, link, host, network.",
    "accelerators": "List the accelerators: memory, bandwidth and dense peaks; the smallest first.",
    "prices": "List the on-demand prices of a machine with region and date; the cheapest first.",
    "images": "List the container images by family and date.",
    "profiles": "List the engine profiles: what each was fitted on; or the constants of the one named.",
}
_EXPLAINED: Final[Mapping[type[Any], str]] = {
    plan.MemorySettings: "Add up weights, KV cache and overhead of a batch, in all and on each device.",
    plan.BatchSettings: "Print the batch at which a decode step becomes compute-bound, with and without the cache.",
    plan.BlendedSettings: "Print the blended price of 1M tokens, by default for 3 input tokens to an output token.",
    plan.SavingsSettings: "Print how much cheaper one machine is, and the throughput from which its tokens are.",
}
_GIVE_WAY: Final = (
    "network Gbit/s, layers, gated, arch, link, vendor, host GiB, checkpoint, models, accelerator, region, "
    "component, platform, devices"
)
_Profile = Annotated[
    str, Option("Profile: a name of `profiles list`, or a file of `calibrate`.", argument=True, metavar="NAME")
]
catalog = typer.Typer(
    name="catalog", help="Models, machines, prices and images that are known, with their sources.", no_args_is_help=True
)
profiles = typer.Typer(name="profiles", help="The engine profiles of `--profile`.", no_args_is_help=True)
explain = typer.Typer(
    name="explain",
    help="The planner's arithmetic with its formulas: memory, batch, blended price, savings.",
    no_args_is_help=True,
)


@spread_options
def doctor(settings: of_setup.DoctorSettings, json_file: JsonFile = None) -> None:
    """Examine this machine, its software and settings: what limits or spoils a measurement.

    Nothing is changed, and AWS is not asked. Exit 1 if something fails.
    """
    from lmi_bench.jobs.doctor import doctor as run

    _print_findings("doctor", run_job(run, settings), {}, json_file)
    note("lmi-bench selftest shows in two minutes how many streams this machine can measure")


@spread_options
def selftest(settings: of_setup.SelftestSettings, json_file: JsonFile = None) -> None:
    """Show what this machine can measure, and that no fault, kill or full disk costs a result.

    Measures a server of its own with known times and faults; about two minutes. Exit 1 if a check
    fails.
    """
    from lmi_bench.jobs.selftest import selftest as run

    found = run_job(run, settings)
    shown = f"{found.streams:,} streams, {found.tokens_per_s:,.0f} tokens/s"
    say(f"selftest: this machine measures {shown} with TTFT and ITL within 1 %")
    figures = {"streams": found.streams, "tokens_per_s": found.tokens_per_s}
    _print_findings("selftest", found.findings, figures, json_file)


def _print_findings(
    name: str, findings: Sequence["Finding"], figures: dict[str, float], json_file: Path | None
) -> None:
    """A line for each; exits with an error if a check failed."""
    rows = [
        {"": each.state, "check": each.check, "found, and what to mend": f"{each.found}. {each.mend}".removesuffix(" ")}
        for each in findings
    ]
    print_table(name.title(), rows, whole=("", "check"), left=("found, and what to mend",))
    counts = Counter(each.state for each in findings)
    say(f"{name}: {', '.join(f'{counts[state]} {state}' for state in ('ok', 'warn', 'fail'))}")
    write_json(json_file, {**figures, "findings": [*map(asdict, findings)]}, "findings")
    if counts["fail"]:
        raise typer.Exit(EXIT_FAILED)


@spread_options
def init(settings: of_setup.InitSettings) -> None:
    """Write a scenario file by a few questions; options answer them beforehand.

    A key is never written into the file: `sweep` takes it from LMI_BENCH_API_KEY.
    """
    from lmi_bench.jobs.init import init as run

    try:
        command = run_job(run, settings, _ask if sys.stdin.isatty() else None)
    except (KeyboardInterrupt, EOFError):
        note("\ninterrupted: nothing was written")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    say(f"scenario: {settings.file}", "next:", f"  {command}")


def _ask(question: str, default: str) -> str:
    return input(f"{question} [{default}]: ") or default


def _lister(name: str) -> Callable[..., None]:
    """The command that lists one table of the catalog."""

    def show(settings: of_setup.CatalogSettings, json_file: JsonFile = None) -> None:
        _print_table(name, settings, json_file)

    show.__doc__ = _TABLES[name]
    return spread_options(show)


def _print_table(name: str, settings: of_setup.CatalogSettings, json_file: Path | None) -> None:
    from lmi_bench.jobs.catalog import catalog_table

    found, warning = catalog_table(name, settings)
    sources = list(dict.fromkeys(row["source"] for row in found))
    rows = [{**row, "source": f"[{sources.index(row['source']) + 1}]"} for row in found]
    texts = [key for key, value in (rows[0] if rows else {}).items() if isinstance(value, str)]
    give_way = [column for column in _GIVE_WAY.split(", ") if column not in texts[:1]]
    long = ("family", "tag", "address")  # of an image
    title = f"Constants of {settings.text}" if "constant" in texts else f"{name.capitalize()}: {len(rows)}"
    print_table(title, rows, left=long, whole=texts, give_way=give_way)
    say(*(f"[{number}] {source or 'not stated'}" for number, source in enumerate(sources, 1)))
    if not rows:
        more = "; `lmi-bench catalog refresh --region R` gets a region's"
        say(f"no {name} match{more if name == 'prices' else ''}")
    if warning:
        warn(warning)
    write_json(json_file, {"rows": found, "warning": warning}, name)


for _name in _TABLES:
    catalog.command(_name)(_lister(_name))
profiles.command("list")(_lister("profiles"))


@profiles.command("show")
@spread_options
def show_profile(name: _Profile, json_file: JsonFile = None) -> None:
    """Show the constants of a profile, as `catalog profiles NAME` does."""
    _print_table("profile", of_setup.CatalogSettings(name), json_file)


@catalog.command()
@spread_options
def refresh(settings: of_setup.RefreshSettings) -> None:
    """Download AWS's prices of today, which every command then uses where they are newer.

    They are written to prices.json in LMI_BENCH_DATA, or in the user's data folder. The AWS
    credentials need pricing:GetProducts.
    """
    from lmi_bench.jobs.catalog import refresh as run

    file, date, numbers = run_job(run, settings)
    counts = ", ".join(f"{number} of {platform}" for platform, number in numbers.items())
    say(f"prices: {file}: {counts}, {settings.region}, {date}")


def _explainer(name: str, kind: type[Any]) -> Callable[..., None]:
    """The command that explains one calculation, whose settings are of this kind."""

    def show(settings: Any, json_file: JsonFile = None) -> None:
        from lmi_bench.jobs import explain as formulas

        explained: formulas.Explanation = getattr(formulas, name)(settings)
        rows = [
            {
                "quantity": term.quantity,
                "value": "never" if term.value is None else format_figure(term.value),
                "unit": term.unit,
                "formula": term.formula,
            }
            for term in explained.terms
        ]
        print_table(explained.title, rows, left=("quantity", "unit", "formula"))
        say(*(f"note: {text}" for text in explained.notes))
        write_json(json_file, asdict(explained), "explanation")

    show.__doc__, show.__annotations__["settings"] = _EXPLAINED[kind], kind
    return spread_options(show)


for _kind in _EXPLAINED:
    _name = _kind.__name__.removesuffix("Settings").lower()
    explain.command(_name)(_explainer(_name, _kind))
