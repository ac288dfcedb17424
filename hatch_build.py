"""Puts the compiled native parts into a wheel for one platform, where that is asked for:

    LMI_BENCH_COMPILED=1 pip wheel --no-deps .

Without the variable the wheel is for any platform, and each part is compiled at its first use. The
step carries kernels for every x86 processor and chooses at run time; all need a C library at least
as new as the building machine's.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from dataclasses import replace
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledParts(BuildHookInterface):
    """Compiles with the flags of a first use, and the compiler's own libraries inside."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("LMI_BENCH_COMPILED") != "1" or version == "editable":
            return
        sys.path.insert(0, self.root)
        from lmi_bench.core.native_build import PARTS, RECEIVER, library, shipped_name

        self._folder = tempfile.TemporaryDirectory()
        os.environ["XDG_CACHE_HOME"] = self._folder.name  # nothing of the user's is taken
        for part in PARTS:
            if part is RECEIVER and sys.platform != "linux":
                continue  # it needs epoll
            static = ("-static-libgcc", *(["-static-libstdc++"] if part.language == "C++" else []))
            source = replace(part, flags=(*part.flags, *static))
            built = library(source, tell=self.app.display_info)
            target = part.path.with_name(shipped_name(part)).relative_to(self.root)
            build_data["force_include"][str(built)] = str(target)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()
