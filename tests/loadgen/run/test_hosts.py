"""The places of a `--hosts` list, and the command that ssh gets for each."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.loadgen.run.hosts import parse_hosts


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("gpu1", ("gpu1", "lmi-bench worker")),
        ("gpu1:~/venv/bin/lmi-bench", ("gpu1", "~/venv/bin/lmi-bench worker")),  # the shell there expands it
        ("gpu1:~ada/my venv/lmi-bench", ("gpu1", "~ada/'my venv/lmi-bench' worker")),
        ("gpu1:~;reboot/x", ("gpu1", "'~;reboot/x' worker")),
        ("[fe80::1%eth0]", ("fe80::1%eth0", "lmi-bench worker")),
        ("ada@[2001:db8::1]:/opt/lmi-bench", ("ada@2001:db8::1", "/opt/lmi-bench worker")),
    ],
)
def test_a_host_becomes_a_command_of_ssh(text, command):
    (host,) = parse_hosts(text)
    assert host.command[-3:] == ("--", *command)


@pytest.mark.parametrize("text", ["fe80::1", "local:/opt/lmi-bench", "join:/opt/lmi-bench", "gpu1:", "[gpu1"])
def test_a_place_that_would_mean_nothing_is_refused(text):
    with pytest.raises(InputError, match="write local, join, HOST or"):
        parse_hosts(text)
