"""Renders results as HTML and Markdown. Called as a function, the package writes a report.

`lmi_bench.report(runs=["runs/a"])` calls `lmi_bench.jobs.face.write_report`: a package and a
function cannot have one name otherwise, and both are wanted.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Report(ModuleType):
    """The package as a function."""

    def __call__(self, **settings: Any) -> Any:
        """Write one self-contained HTML page; `help(lmi_bench.write_report)` lists the keywords."""
        return import_module("lmi_bench.jobs.face").write_report(**settings)


sys.modules[__name__].__class__ = _Report
