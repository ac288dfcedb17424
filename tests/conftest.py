"""Before anything is imported: what a library reads only once."""

from __future__ import annotations

import os

# Triton looks at it when it is first imported, which transformers may do before the tests of
# its kernels are reached
os.environ.setdefault("TRITON_INTERPRET", "1")
