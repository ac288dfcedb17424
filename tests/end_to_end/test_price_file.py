"""The price file of docs/planning.md, planned as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tests.end_to_end.commands import lmi_bench

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_price_file_of_the_page_plans_machines_of_another_cloud(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    table = re.search(r"    # clouds\.csv\n((?:    \S.*\n)+)", text)[1]
    command = re.search(r"    lmi-bench (recommend --platform file.*)\n", text)[1]
    (tmp_path / "clouds.csv").write_text(table.replace("    ", ""), encoding="utf-8")
    done = lmi_bench(*shlex.split(command), "--json", "rec.json", cwd=tmp_path)
    said = done.stdout
    answer = json.loads((tmp_path / "rec.json").read_text())
    prices = {"h200-8": 24.0, "mi300x-8": 16.0, "l40s-4": 5.2}
    named = {each["instance"] for each in answer["candidates"]}
    assert named | {each["instance"] for each in answer["rejected"]} == {*prices}
    best = answer["recommended"]
    assert best["price_usd_per_hour"] == best["instances"] * prices[best["instance"]]
    assert best["estimated"] is False
    assert "~" not in said


def test_a_missing_option_hides_behind_no_machine_of_the_file(tmp_path):
    (tmp_path / "clouds.csv").write_text("instance\n", encoding="utf-8")
    model = ("predict", "--model", "qwen3-8b", "--input-tokens", "64", "--output-tokens", "64")
    for machine in (("local",), ("h200-8", "--prices", "clouds.csv")):
        done = lmi_bench(*model, "--instance", *machine, cwd=tmp_path, expect=2)
        assert "not in the catalog" not in done.stderr
