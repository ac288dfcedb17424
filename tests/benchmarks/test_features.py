"""Every row of the page of features has a command, and each fails where nothing happens."""

import re
from dataclasses import replace

import pytest

from benchmarks.features import PAGE, ROOT, Place, entries, rows_of_page, shown_by

ENTRIES = entries()


def test_every_row_has_an_entry_and_names_a_command():
    page = PAGE.read_text(encoding="utf-8")
    assert set(rows_of_page()) == {row for entry in ENTRIES for row in entry.rows}
    for number, shown in re.findall(r"^\| (\d+) \| [^|]+ \| (.*) \|$", page, re.MULTILINE):
        assert re.search(r"`[^`]*(?:lmi-bench|lmi_bench) ", shown), number


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"row_{entry.rows[0]}")
def test_a_command_that_does_nothing_does_not_show_its_rows(entry, tmp_path):
    silent = replace(entry, run="true", serve=(), code=0)
    assert shown_by(Place(tmp_path, ROOT), silent) is not None
