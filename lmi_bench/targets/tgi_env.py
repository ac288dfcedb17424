"""Reads a server's limits from environment variables with TGI's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lmi_bench.core.errors import InputError

_SETTINGS: Final = {
    "MAX_CONCURRENT_REQUESTS": "max_concurrent_requests",
    "MAX_TOTAL_TOKENS": "max_model_len",
    "MAX_INPUT_TOKENS": "max_input_tokens",
    "MAX_INPUT_LENGTH": "max_input_tokens",  # the older name
    "MAX_BATCH_PREFILL_TOKENS": "max_rolling_batch_prefill_tokens",
    "MAX_BATCH_TOTAL_TOKENS": "max_batch_total_tokens",
}


def limits_from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Engine settings by name, each with its variable and its value.

    An empty variable counts as absent. Raises InputError for a value that is not a whole number
    above 0, and if both variables for the maximum prompt length are set.
    """
    found: dict[str, tuple[str, int]] = {}
    for variable, setting in _SETTINGS.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise InputError(
                f"{variable}={text} in the environment: expected a whole number above 0"
            )
        if setting in found:
            raise InputError(
                f"{found[setting][0]} and {variable} are both set, and mean the same: unset one"
            )
        found[setting] = (variable, int(text))
    return found
