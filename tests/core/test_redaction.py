"""What is cut out of text that people attach to bug reports, and what must stay in it."""

from __future__ import annotations

import pytest

from lmi_bench.core.redaction import redact, redact_text

LATE = "requests left 11.3 ms late; give it more --workers, or ask for less load"


def test_a_long_secret_is_cut_out_of_the_middle_of_a_word():
    assert redact_text("x-abcdefgh1234-y", ["abcdefgh1234"]) == "x-<redacted>-y"


def test_a_short_secret_is_cut_out_as_a_word_and_not_out_of_others():
    """A key such as `load` would otherwise eat half of every message."""
    assert redact_text("no key load, but load7", ["load"]) == "no key <redacted>, but load7"


@pytest.mark.parametrize("placeholder", ["k", "1", "x", ""])
def test_a_key_that_is_none_leaves_messages_as_they_are(placeholder):
    assert redact_text(LATE, [placeholder]) == LATE


def test_a_one_letter_key_is_still_hidden_where_it_is_named_as_one():
    command = ["lmi-bench", "sweep", "--api-key", "k", "-H", "Authorization: Bearer k"]
    assert redact(command, ["k"]) == [
        "lmi-bench",
        "sweep",
        "--api-key",
        "<redacted>",
        "-H",
        "Authorization: <redacted>",
    ]
    assert redact({"api_key": "k"}, ["k"]) == {"api_key": "<redacted>"}


@pytest.mark.parametrize("name", ["api_key", "sig", "code", "token"])
def test_a_key_in_the_query_of_a_url_is_hidden_and_the_rest_is_not(name):
    url = f"https://host/path?api-version=2024-06&{name}=abc/def%3D&top=1"
    shown = f"https://host/path?api-version=2024-06&{name}=<redacted>&top=1"
    assert redact_text(url) == shown
