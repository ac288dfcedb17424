"""The engine's settings as options: their names, and what they say of the scenario."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from lmi_bench.cli.command import Command, spread_options
from lmi_bench.core.engine_fields import ModelFields
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Stated
from lmi_bench.jobs.settings.bundled import ServeSettings
from lmi_bench.jobs.settings.engine import stated_settings


@pytest.fixture
def stated():
    """The settings that a command line states."""
    seen = []
    app = typer.Typer()

    @spread_options
    def command(settings: ServeSettings):
        seen.append(stated_settings(settings))

    app.command(cls=Command)(command)

    def call(*args):
        seen.clear()
        CliRunner().invoke(app, list(args), catch_exceptions=False)
        return seen[0]

    return call


def test_nothing_is_stated_by_default(stated):
    assert stated() == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--max-rolling-batch-size", "8"], ["--max-batch", "8"]),
        (["--max-rolling-batch-prefill-tokens=99"], ["--prefill-tokens", "99"]),
        (["--enforce-eager"], ["--graphs", "off"]),
        (["--cuda-graphs"], ["--graphs", "on"]),
    ],
)
def test_names_of_earlier_releases_mean_the_same(stated, old, new):
    assert stated(*old) == stated(*new) != {}


def test_settings_have_their_names_and_values_of_the_scenario(stated):
    found = stated("--tp", "4", "--graphs", "off", "--quantize", "awq", "--router", "least-outstanding")
    assert found == {"tensor_parallel": 4, "enforce_eager": True, "quantize": "awq-int4", "router": "least_outstanding"}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"tensor_parallel": "0"}, "--tp 0: write a number of at least 1, or max"),
        ({"enforce_eager": "no"}, "--graphs no: write on or off"),
    ],
)
def test_a_value_that_cannot_be_read_names_its_option(steps, message):
    with pytest.raises(InputError, match=message):
        stated_settings(Stated(ModelFields, values=steps))
