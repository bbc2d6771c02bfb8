"""A run whose workers share memory: `paceline train` without servers, and what it does not offer."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.shard.manifest import Manifest
from paceline.train.metrics import read_metrics
from paceline.train.servers.supervisor.joining import join_run
from paceline.verify.server_replay import verify_replay
from tests.train.servers.runs import started

TOYS = Path(__file__).with_name("toys.py")
RECIPE = {
    "name": "toy",
    "model": {"factory": f"{TOYS}:build_clicks"},
    "data": {"source": "factory", "dataset": f"{TOYS}:words", "validation": 0.1},
    "train": {"steps": 60, "batch": 16, "validate": {"every": 30}},
    "optimizer": {"name": "Adagrad", "lr": 0.1},
    "server": {"workers": 2, "consistency": "hogwild", "tables": {"words.weight": "ids"}, "rows": 1000},
}


def test_workers_share_memory_and_what_they_learnt_is_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, recipe=RECIPE) as run:
        assert run.finish() == 0, run.said
    assert "verify --replay" not in run.said
    rows = read_metrics(out / "metrics.jsonl", "validation")  # one may begin early and end late
    last = max(rows, key=lambda row: row["step"])
    assert last["step"] == 60 and last["loss"] < 0.9
    assert Manifest.read(Directory(out / "exchange").snapshot(1)).first_task == 120
    model = load_file(out / "model.safetensors")
    assert sorted(model["words.weight.keys"].tolist()) == [0, 1, 1000, 1001, 2000, 2001]
    assert not list(tmp_path.rglob("memory"))
    with pytest.raises(ExchangeError, match="in no order that anybody sees"):
        verify_replay(out)
    with pytest.raises(ExchangeError, match="there are no servers"):
        join_run(out, "server", 1)
