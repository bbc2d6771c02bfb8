"""Rows of tables are measured and shown."""

from __future__ import annotations

import pytest
from rich.console import Console

from paceline.bench.server import rows
from paceline.errors import RecipeError


def test_rows_are_measured_and_shown():
    options = {"table_rows": "1000,3000", "table_widths": "8", "table_rules": "ftrl", "table_batch": "500"}
    found = rows.run({**options, "table_rounds": "2"})
    tables = found["rows"]
    assert [(one["rows"], one["of"]) for one in tables if one["of"] != "table"] == [
        (1000, "table in numpy"),
        (1000, "plain tensor"),
        *([(3000, "table in numpy")] if all(one["of"] != "table" for one in tables) else []),
        (3000, "plain tensor"),
    ]
    assert all(one["read_rows_s"] > 0 and one["update_rows_s"] > 0 for one in tables)
    assert all(one["bytes_a_row"] >= 8 * 4 * 3 for one in tables if "bytes_a_row" in one)
    console = Console(width=120, record=True)
    rows.show(console, found)
    assert "ftrl" in console.export_text()


def test_what_is_unknown_is_explained():
    with pytest.raises(RecipeError, match="Did you mean 'adagrad'"):
        rows.run({"table_rules": "adagard"})
