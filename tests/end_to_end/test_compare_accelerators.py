"""The comparison as a person reads it."""

from __future__ import annotations

import json
import sys

import pytest

from lmi_bench.cli.main import main


def test_four_steps_and_three_tables_are_printed_and_saved(tmp_path, monkeypatch, capsys):
    path = tmp_path / "accelerators.json"
    arguments = ["-m", "llama-2-7b", "--top", "3", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["lmi-bench", "compare-accelerators", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    content = json.loads(path.read_text())
    rows = {row["accelerator"]: row for row in content["four_steps"]}
    assert rows["A10G"]["critical_batch"] == pytest.approx(116.7, abs=0.1)
    assert "us-east-1" in rows["A10G"]["price_source"]
    assert content["layouts"]
    assert "accelerators.json" in capsys.readouterr().out


def test_a_model_that_runs_nowhere_is_said_to(monkeypatch, capsys):
    arguments = ["-m", "falcon-180b", "--input-tokens", "3000"]
    monkeypatch.setattr(sys, "argv", ["lmi-bench", "compare-accelerators", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "runs on none of these machines" in capsys.readouterr().err
