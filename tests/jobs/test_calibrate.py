"""`calibrate` and `validate` on tables of many levels: bounded time, and progress meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_bench.jobs import calibrate as job
from lmi_bench.jobs.settings.plan import CalibrateSettings, ValidateSettings
from tests.jobs.hearing import Hearing

PUBLISHED = Path(__file__).parents[2] / "lmi_bench/catalog/data/published"


class Following(Hearing):
    """Keeps progress, too."""

    def __init__(self):
        super().__init__()
        self.progressed = []

    def progress(self, description, done, total):
        self.progressed.append((description, done, total))


@pytest.fixture
def table(tmp_path):
    lines = (PUBLISHED / "jumpstart_concurrency.csv").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "few.csv"
    path.write_text("\n".join(lines[:13]) + "\n", encoding="utf-8")
    return path


def test_the_most_telling_lines_of_a_long_table_are_fitted(table, monkeypatch):
    heard = Following()
    whole = job.calibrate(CalibrateSettings([table]), heard)
    assert len(whole.fit.cells) == 12
    assert not heard.warnings
    assert heard.progressed[0] == ("fit to 12 levels", 0, None)

    monkeypatch.setattr(job, "_MOST_LINES", 4)
    part = job.calibrate(CalibrateSettings([table]), heard)
    assert heard.warnings == [f"{table}: uses the 4 most telling of 12 lines"]
    assert len(part.fit.cells) == 4
    assert set(part.fit.cells) < set(whole.fit.cells)
    users = [cell.concurrency for cell in part.fit.cells]
    assert min(users) < 8 < max(users), "from both ends of the load"


def test_validate_follows_the_levels_that_it_judges(table):
    heard = Following()
    job.validate(ValidateSettings([table], calibrate_cells=3), heard)
    assert heard.progressed == [("levels", done, 12) for done in range(13)]
