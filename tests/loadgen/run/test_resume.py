"""Killed at any moment, a sweep goes on where it stopped: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lmi_bench.core.run_store import load_run

# Levels of 1, 2 and 4 users whose answers take 0.1 s. Each request is noted before it is sent, so
# that one which is sent twice would show.
SWEEP = """
import asyncio, sys
from pathlib import Path
from lmi_bench.loadgen.prompts.prompts import Lengths, no_text, SyntheticPrompts
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.manifest import Manifest
from lmi_bench.core.run_store import RunStore
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec

folder, sent = Path(sys.argv[1]), Path(sys.argv[2])

class Server:
    def __init__(self):
        self.level = 0
    async def open_level(self, connections):
        self.level = connections
    def end_level(self):
        from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
        return ReceiveSignals()
    async def send(self, request):
        with sent.open("a") as file:
            file.write(f"{self.level}/{request.request_id}\\n")
        sent_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.1)
        return Exchange(sent_s, (asyncio.get_running_loop().time(),))

levels = [LevelSpec(i, Load(c), num_requests=c * 4) for i, c in enumerate((1, 2, 4))]
if folder.exists():
    store = RunStore.resume(folder, Manifest(scenario_hash="h"))
else:
    store = RunStore.create(folder, Manifest(scenario_hash="h"))
with store:
    try:
        run_on_sockets(run_sweep(
            levels, Server(), store,
            prompts=SyntheticPrompts([Lengths(8, 1)], no_text, seed=0), summarise=summarise_level,
        ))
    except KeyboardInterrupt:
        sys.exit(130)
"""


class Sweeps:
    """One run folder and the processes that work on it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "run"
        self.sent = tmp_path / "sent"

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", SWEEP, str(self.folder), str(self.sent)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )

    def sent_requests(self) -> list[str]:
        return self.sent.read_text().split() if self.sent.exists() else []

    def wait_until_sent(self, request: str) -> None:
        deadline_s = time.monotonic() + 600
        while request not in self.sent_requests():
            assert time.monotonic() < deadline_s, f"{request} was never sent"
            time.sleep(0.01)

    def files(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in ("requests.jsonl", "levels.jsonl")}


@pytest.fixture
def sweeps(tmp_path):
    return Sweeps(tmp_path)


@pytest.mark.parametrize(("stop", "exit_code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_sweep_stopped_in_mid_level_resumes_there(sweeps, stop, exit_code):
    process = sweeps.start()
    sweeps.wait_until_sent("2/3")  # the second level is under way, the first is finished
    process.send_signal(stop)
    assert process.wait(timeout=120) == exit_code
    before = sweeps.files()
    assert [level.index for level in load_run(sweeps.folder).levels] == [0]

    assert sweeps.start().wait(timeout=120) == 0
    run = load_run(sweeps.folder)
    assert [level.index for level in run.levels] == [0, 1, 2]
    assert [len(records) for records in run.records] == [4, 8, 16]
    for name, content in sweeps.files().items():
        assert content.startswith(before[name]), "finished levels are kept byte for byte"
    times = Counter(sweeps.sent_requests())
    assert {times[f"1/{i}"] for i in range(4)} == {1}, "a finished level is not run again"
    assert {times[f"4/{i}"] for i in range(16)} == {1}


def test_a_second_sweep_on_the_same_folder_is_refused(sweeps):
    first = sweeps.start()
    sweeps.wait_until_sent("1/0")
    first.send_signal(signal.SIGSTOP)  # it holds the folder until the second has looked
    second = subprocess.run(
        [sys.executable, "-c", SWEEP, str(sweeps.folder), str(sweeps.sent)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    first.send_signal(signal.SIGCONT)
    assert second.returncode != 0
    assert f"another sweep (process {first.pid})" in second.stderr
    assert first.wait(timeout=120) == 0
