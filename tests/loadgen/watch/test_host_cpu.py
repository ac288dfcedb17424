"""CPU time that a server on this machine did not get."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from lmi_bench.loadgen.watch.machine import CpuReading, HostCpu, listening_process, taken_frac

START = CpuReading(total=1000, idle=500, stolen=10, ours=100)


@pytest.mark.parametrize(
    ("idle", "stolen", "ours", "known", "taken"),
    [
        (0, 0, 100, True, 0.5),  # two full cores, half of their time by others
        (60, 0, 40, True, 0.0),  # others ran, and cores were idle
        (0, 100, 100, True, 0.5),
        (0, 50, 50, True, 0.75),
        (60, 30, 60, True, 0.15),  # the hypervisor's share counts although cores were idle
        (0, 0, 100, False, 0.0),  # the server's own use is unknown
        (0, 20, 100, False, 0.1),
    ],
)
def test_what_others_took_counts_where_no_core_was_idle(idle, stolen, ours, known, taken):
    last = CpuReading(1200, 500 + idle, 10 + stolen, 100 + ours)
    assert taken_frac(START, last, counts_others=known) == pytest.approx(taken)


def test_without_time_nothing_is_known():
    assert taken_frac(START, START, counts_others=True) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_servers_process_and_its_children_are_its_own():
    code = (
        "import os, socket, time\n"
        "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "if os.fork() == 0:\n"
        "    end = time.process_time() + 0.5\n"
        "    while time.process_time() < end: pass\n"
        "    print('burnt', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            assert listening_process(port) == server.pid
            cpu = HostCpu(port)
            assert cpu.taken_frac() is None
            first = cpu._first
            assert server.stdout.readline() == "burnt\n"
            cpu.read()
            assert 0 <= cpu.taken_frac() <= 1
            assert cpu._last.ours - first.ours > 0.2 * os.sysconf("SC_CLK_TCK")
        finally:
            subprocess.run(["pkill", "-P", str(server.pid)], check=False)
            server.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_port_without_a_listener_has_no_process():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        assert listening_process(port) == os.getpid()
    time.sleep(0.01)
    assert listening_process(port) is None
