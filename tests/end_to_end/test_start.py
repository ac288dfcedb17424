"""What a command loads before it does anything."""

from __future__ import annotations

from dataclasses import fields

import typer
from rich.text import Text
from typer.core import TyperGroup, TyperOption

from lmi_bench.cli.main import app
from lmi_bench.core.engine_fields import BatchingFields, ModelFields
from lmi_bench.core.scenario import EngineSection
from lmi_bench.jobs.settings.engine import COMPILED
from tests.end_to_end.commands import lmi_bench, modules_loaded_by

HEAVY = ("torch", "numpy", "pandas", "matplotlib", "boto3", "aiohttp", "scipy", "plotly")


def test_help_loads_nothing_heavy():
    code = (
        "import sys, contextlib, io\n"
        "sys.argv = ['lmi-bench', '--help']\n"
        "from lmi_bench.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main()\n"
    )
    assert modules_loaded_by(code, HEAVY) == set()


def test_the_scheduler_loads_neither_torch_nor_asyncio():
    code = "import lmi_bench.engine.scheduling.scheduler"
    assert modules_loaded_by(code, ("torch", "asyncio", "numpy", "random")) == set()


def test_a_simulated_sweep_loads_no_torch(tmp_path):
    code = (
        "import sys, contextlib, io\n"
        "sys.argv = 'lmi-bench sweep --target sim:ml.g5.2xlarge --model llama-2-7b "
        f"--concurrency 1 --output-tokens 4 --out {tmp_path / 'run'}'.split()\n"
        "from lmi_bench.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main()\n"
    )
    assert modules_loaded_by(code, ("torch", "plotly", "matplotlib", "boto3", "scipy")) == set()


def test_every_command_explains_itself():
    for name in ("sweep", "recommend", "report", "serve"):
        assert name in lmi_bench(name, "--help").stdout


def test_no_word_of_a_help_text_is_taken_for_markup():
    # typer prints helps through rich, which drops what looks like a tag: "[from memory]"
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    helps = [
        (name, parameter.name, parameter.help)
        for name, command in group.commands.items()
        for parameter in command.params
        if isinstance(parameter, TyperOption) and parameter.help
    ]
    assert len(helps) > 100
    assert [h for h in helps if Text.from_markup(h[2]).plain != h[2]] == []


def test_no_two_options_of_a_command_share_a_name():
    # click takes the later one without a word: `sweep --trace` once drew the engine's steps
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        names = [each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)]
        assert len(names) == len(set(names)), name


def test_trace_is_recorded_traffic_and_step_trace_a_chrome_trace():
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    named = {
        (name, option)
        for name, command in group.commands.items()
        for parameter in command.params
        for option in parameter.opts
        if option in ("--trace", "--step-trace")
    }
    assert named >= {("sweep", "--step-trace"), ("serve", "--step-trace"), ("sweep", "--trace")}
    assert ("serve", "--trace") not in named


def test_shared_options_reach_every_command_that_starts_an_engine():
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    held = {field.name for field in fields(ModelFields)}
    batching = {field.name for field in fields(BatchingFields)}
    for name, wanted in (
        ("sweep", held | batching),
        ("serve", held | batching),
        ("generate", held),
        ("compile", set(COMPILED.names)),
    ):
        assert wanted <= {parameter.name for parameter in group.commands[name].params}
    assert held | batching == set(EngineSection.model_fields)


def test_compile_takes_no_option_that_changes_nothing_of_a_compiled_step():
    command = typer.main.get_command(app).commands["compile"]
    taken = {parameter.name for parameter in command.params}
    assert taken == {"model", "out", "shapes", *COMPILED.names}
