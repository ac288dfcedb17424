"""Puts the compiled step into a wheel for one platform, where that is asked for:

    LMI_BENCH_COMPILED=1 pip wheel --no-deps .

Without the variable the wheel is for any platform, and the step is compiled at its first use. The
library carries kernels for every x86 processor and chooses at run time; it needs a C library at
least as new as the building machine's.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from dataclasses import replace
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledStep(BuildHookInterface):
    """Compiles with the flags of a first use, and the compiler's own libraries inside."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("LMI_BENCH_COMPILED") != "1" or version == "editable":
            return
        sys.path.insert(0, self.root)
        from lmi_bench.core.native_build import library, shipped_name
        from lmi_bench.engine.native_backend.binding import SOURCE

        self._folder = tempfile.TemporaryDirectory()
        os.environ["XDG_CACHE_HOME"] = self._folder.name  # nothing of the user's is taken
        flags = (*SOURCE.flags, "-static-libstdc++", "-static-libgcc")
        built = library(replace(SOURCE, flags=flags), tell=self.app.display_info)
        target = SOURCE.path.with_name(shipped_name(SOURCE)).relative_to(self.root)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["force_include"][str(built)] = str(target)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()
