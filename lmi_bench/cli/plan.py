"""The commands that plan: recommend, predict, calibrate, validate, verify, plan-day ..."""

from typing import Annotated

import typer

from lmi_bench.cli.command import JsonFile, spread_options
from lmi_bench.cli.console import Terminal, note, run_job, say, warn, write_json
from lmi_bench.core.errors import EXIT_FAILED, EXIT_INTERRUPTED
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings import plan
from lmi_bench.jobs.settings.recommend import RecommendSettings


@spread_options
def recommend(settings: RecommendSettings, json_file: JsonFile = None) -> None:
    """Rank instances, TP degrees and replicas by cost, latency or throughput under SLOs.

    Without a load: one machine, loaded up to the limits. With a run, its levels calibrate the
    step-time model first. Engine settings may be several values between commas: the best
    combination wins.
    """
    from lmi_bench.cli.plan_print import print_portfolio
    from lmi_bench.cli.recommend_print import print_advice
    from lmi_bench.jobs import recommend as job

    if settings.portfolio is not None:
        portfolio = run_job(job.plan_portfolio, settings)
        print_portfolio(portfolio)
        write_json(json_file, portfolio.to_json(), "portfolio")
        return
    advice = run_job(job.recommend, settings)
    print_advice(advice, explain=settings.explain)
    write_json(json_file, advice.to_json(), "recommendation")
    if advice.answer.exit_code:
        raise typer.Exit(advice.answer.exit_code)


@spread_options
def predict(settings: plan.PredictSettings, json_file: JsonFile = None) -> None:
    """Predict throughput and latency with 80 % intervals, and what limits them.

    Above 80 % of the capacity and its interval's lower end, an open loop gets no latency.
    Unequal requests, traces and routers are simulated with the engine's own scheduler.
    """
    from lmi_bench.cli.plan_print import print_prediction
    from lmi_bench.jobs.predict import predict as run

    prediction = run_job(run, settings)
    print_prediction(prediction)
    write_json(json_file, prediction.to_json(), "predictions", indent=1)


@spread_options
def calibrate(settings: plan.CalibrateSettings) -> None:
    """Fit a profile to measured levels: parameters with their uncertainty, and largest errors.

    With --on, the levels are chosen and measured first: six, in at most 10 minutes.
    """
    from lmi_bench.analysis.model.profiles import profile_to_json
    from lmi_bench.cli.plan_print import print_calibration, print_captured
    from lmi_bench.core.durable import write_text
    from lmi_bench.jobs.calibrate import calibrate as run

    out = settings.out
    if settings.on is None:
        calibration = run_job(run, settings)
    else:
        from lmi_bench.jobs.capture import capture
        from lmi_bench.targets.profiles import kept_profile_file

        folder, captured = run_job(capture, settings)
        if captured is None:
            note(f"interrupted: the same command with --run-dir {folder} goes on")
            raise typer.Exit(EXIT_INTERRUPTED)
        calibration, out = captured, out or folder / "profile.json"
        print_captured(calibration.profile.capture["cells"])
        if settings.keep is not None:
            write_text(kept_profile_file(settings.keep), profile_to_json(calibration.profile))
    print_calibration(calibration)
    if out is not None:
        write_text(out, profile_to_json(calibration.profile))
        say(f"profile: {out}")
    if settings.keep is not None:
        say(f"kept as {settings.keep}: lmi-bench recommend --profile {settings.keep}")


@spread_options
def validate(settings: plan.ValidateSettings, json_file: JsonFile = None) -> None:
    """Predict measured levels and print errors, interval coverage and half-width by slice.

    Without calibration or profile: by the shipped profile of the table's engine. Without a table:
    the errors of the shipped profiles themselves.
    """
    from lmi_bench.cli.plan_print import print_shipped, print_validation
    from lmi_bench.jobs.calibrate import validate as run
    from lmi_bench.jobs.calibrate import validate_shipped

    if settings.sources:
        validation = run_job(run, settings)
        print_validation(validation)
        write_json(json_file, validation.to_json(), "predictions", indent=1)
    else:
        with Terminal() as listener:
            shipped = validate_shipped(listener)
        print_shipped(shipped)
        write_json(json_file, shipped.to_json(), "errors", indent=1)


@spread_options
def verify(settings: plan.VerifySettings, json_file: JsonFile = None) -> None:
    """Replay a recommendation's load and check which figures lie inside their intervals.

    It ends as soon as an SLO is certain to be missed. Exit 99 if one is missed, 2 if one was not
    measured, for too few requests.
    """
    from lmi_bench.analysis.fleet.verification import contradicts
    from lmi_bench.cli.plan_print import print_learned, print_verification
    from lmi_bench.cli.sweep_print import print_sweep
    from lmi_bench.jobs.verify import verify as run

    found = run_job(run, settings)
    say(*(f"in the recommendation {text}" for text in found.caveats))
    if found.sweep.interrupted:
        note(f"interrupted: {found.sweep.folder} is not whole; start again with another --out")
        raise typer.Exit(EXIT_INTERRUPTED)
    if found.sweep.failed:
        print_sweep(found.sweep)
        raise typer.Exit(EXIT_FAILED)
    warn(*found.warnings)
    print_verification(found)
    if found.learned is not None:
        print_learned(found.learned)
    elif contradicts(found.figures):
        say(
            "the profile does not describe this target: sweep it at several loads and plan "
            "again from that run (lmi-bench recommend RUN_DIR), or add --update-profile P.json"
        )
    print_sweep(found.sweep)
    write_json(json_file, found.to_json(), "verification")
    if found.exit_code:
        raise typer.Exit(found.exit_code)


@spread_options
def plan_day(settings: plan.DaySettings, json_file: JsonFile = None) -> None:
    """Simulate 24 hours of load: autoscaling with its start-up time against a flat fleet.

    A machine costs from its launch and serves only after its start-up. If scaling cannot keep
    the SLOs during the ramps, the flat fleet wins.
    """
    from lmi_bench.cli.plan_print import print_day
    from lmi_bench.jobs.fleet import plan_day as run

    day = run_job(run, settings)
    print_day(day)
    write_json(json_file, day.to_json(), "day")


@spread_options
def compare_accelerators(
    settings: plan.AcceleratorSettings,
    top: Annotated[int, Option("Rows of each table.", must="at least 1")] = 12,
    json_file: JsonFile = None,
) -> None:
    """Compare accelerators: B*, KV at B*, devices needed, price per GB/s; then predicted latency,
    throughput and cost.

    The engine profile makes the predictions until you measure: `sweep`, then `recommend RUN_DIR`.
    """
    from lmi_bench.cli.plan_print import print_accelerators
    from lmi_bench.jobs.fleet import compare_accelerators as run

    comparison = run_job(run, settings)
    print_accelerators(comparison, top)
    write_json(json_file, comparison.to_json(), "comparison")
