"""A missing package and an unreadable file, each as one line that says what to do."""

from __future__ import annotations

import re

import pytest

from lmi_bench.core.durable import read_text
from lmi_bench.core.errors import InputError, installed


@pytest.mark.parametrize(
    ("package", "command"),
    [("torch", "pip install 'lmi-bench[engine]', or a URL"), ("triton", "pip install triton, or")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, command):
    said = re.escape(f"the engine needs {package}: {command}")
    with pytest.raises(InputError, match=said), installed("the engine", ", or a URL"):
        raise ImportError(name=package)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*none: No such file"):
        read_text(tmp_path / "none")
    latin = tmp_path / "latin"
    latin.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(InputError, match=r"it is not UTF-8 text \(byte 2\)"):
        read_text(latin)
