"""What the recommend command makes of its options."""

from __future__ import annotations

import pytest

import lmi_bench
from lmi_bench.core.errors import InputError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0, "users": 3, "think_time": 1.0}, "not both"),
        ({"rate": 0.0}, "--rate must be above 0"),
        ({"users": 0, "think_time": 1.0}, "--users must be at least 1"),
        ({"users": 3}, "belong together"),
        ({"think_time": 3.0}, "belong together"),
        ({"users": 3, "think_time": -1.0}, "--think-time must be 0 s or more"),
    ],
)
def test_a_load_that_is_not_whole_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        lmi_bench.recommend(
            model="llama-2-7b",
            instance=["ml.g5.2xlarge"],
            input_tokens=64,
            output_tokens=8,
            **options,
        )
