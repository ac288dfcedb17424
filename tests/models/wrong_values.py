"""What a key of a file may hold although nothing good comes of it."""

from __future__ import annotations

import math

WRONG = (*(math.nan, math.inf, -1, 0, 1.5, 10**12, 10**30), *("", "x", True, None), *([], [1], [{}, []], {}, {"a": 1}))
