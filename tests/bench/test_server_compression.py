"""Codecs are measured and shown."""

from __future__ import annotations

import pytest
from rich.console import Console

from paceline.bench.server import compression
from paceline.errors import ExchangeError, RecipeError


def test_codecs_are_measured_and_shown():
    options = {"codecs": "int8;top_k(0.25)", "codec_rows": "64", "codec_columns": "32", "codec_rounds": "2"}
    found = compression.run(options)
    codecs = found["compression"]
    assert codecs["int8"]["ratio"] == pytest.approx(4 / (1 + 4 / 128))
    assert codecs["top_k(0.25)"]["ratio"] == pytest.approx(2)
    assert all(one["encode_mb_s"] > 0 and one["worth_below_mb_s"] > 0 for one in codecs.values())
    console = Console(width=120, record=True)
    compression.show(console, found)
    assert "top_k(0.25)" in console.export_text()


def test_what_is_unknown_is_explained():
    with pytest.raises(ExchangeError, match="Did you mean 'int8'"):
        compression.run({"codecs": "int9"})
    with pytest.raises(RecipeError, match="from 2"):
        compression.run({"codec_rounds": "1"})
