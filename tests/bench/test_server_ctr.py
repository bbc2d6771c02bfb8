"""Samples a second of the recipe of clicks are measured, of us and of peers, and shown."""

import pytest
from rich.console import Console

from paceline.bench.server import ctr
from paceline.bench.server.ctr import Contestant, Settings
from paceline.errors import RecipeError

SPEEDS = {Contestant.SERVERS: 1000.0, Contestant.DDP: 250.0, Contestant.ONE_DENSE: 500.0, Contestant.ONE_SPARSE: 2000.0}


def test_everybody_has_a_turn_and_is_shown(monkeypatch):
    turns = []
    monkeypatch.setattr(ctr, "_turn", lambda who, rows, settings: turns.append((who, rows)) or SPEEDS[who])
    found = ctr.run({"ctr_rounds": "2", "ctr_rows": "200,300"})
    assert sorted(turns) == sorted([(who, rows) for who in Contestant for rows in (200, 300)] * 2)
    speeds = found["ctr"]["samples_s"]["300"]
    assert set(speeds) == set(Contestant) and speeds["ddp-dense"]["ours_to_it"]["median"] == 4
    assert set(found["ctr"]["lines_s"]) == {"libsvm", "criteo"} and min(found["ctr"]["lines_s"].values()) > 0
    console = Console(width=120, record=True)
    ctr.show(console, found)
    text = console.export_text()
    assert "one-process-sparse" in text and "0.50 (0.50 to 0.50)" in text and "criteo" in text


def test_a_peer_trains():
    settings = Settings(ctr_steps=3, ctr_batch=32)
    assert ctr._turn(Contestant.DDP, 200, settings) > 0


def test_what_is_unknown_is_explained(monkeypatch, tmp_path):
    with pytest.raises(RecipeError, match="Did you mean 'ctr_steps'"):
        ctr.run({"ctr_step": "3"})
    monkeypatch.setattr(ctr, "RECIPE", tmp_path / "ctr.yaml")
    with pytest.raises(RecipeError, match=r"no .*ctr\.yaml; run this part of the benchmark from the repository"):
        ctr.run({})
