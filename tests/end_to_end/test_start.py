"""What a command loads before it does anything."""

from __future__ import annotations

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
    assert modules_loaded_by(code, ("torch", "plotly", "matplotlib", "boto3")) == set()


def test_every_command_explains_itself():
    for name in ("sweep", "recommend", "report", "serve"):
        assert name in lmi_bench(name, "--help").stdout
