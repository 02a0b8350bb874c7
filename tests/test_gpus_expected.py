"""The page about GPUs shows what its script computes."""

from pathlib import Path

import pytest
import script_files

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "gpus_expected.md"


def test_the_page_has_the_tables_of_the_script(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpus_expected.py"])
    script_files.load("studies/gpus_expected").main()
    note, *tables = capsys.readouterr().out.strip().split("\n\n")
    text = PAGE.read_text("utf-8")
    assert note == "Expected, not measured." and "**Expected, not measured" in text
    assert len(tables) == 2 and all(table in text for table in tables)


def test_efficiency_lies_between_an_exchange_that_is_not_hidden_and_one_that_is():
    script = script_files.load("studies/gpus_expected")
    for step, exchange, least, most in [(0.1, 0, 1, 1), (0.3, 0.1, 0.75, 1), (0.3, 0.5, 3 / 8, 3 / 6)]:
        assert script.efficiency(step, exchange) == pytest.approx((least, most))
