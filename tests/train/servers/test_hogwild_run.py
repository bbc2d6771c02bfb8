"""A run whose workers share memory: `paceline train` without servers, and what it does not offer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.shard.manifest import Manifest
from paceline.train.metrics import read_metrics
from paceline.train.servers.supervisor.joining import join_run
from paceline.verify.server_replay import verify_replay

TOYS = Path(__file__).with_name("toys.py")
RECIPE = {
    "name": "toy",
    "model": {"factory": f"{TOYS}:build_clicks"},
    "data": {"source": "factory", "dataset": f"{TOYS}:words", "validation": 0.1},
    "train": {"steps": 60, "batch": 16, "validate": {"every": 30}},
    "optimizer": {"name": "Adagrad", "lr": 0.1},
    "server": {"workers": 2, "consistency": "hogwild", "tables": {"words.weight": "ids"}, "rows": 1000},
}


def _train(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "train", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_workers_share_memory_and_what_they_learnt_is_written(tmp_path: Path) -> None:
    out, path = tmp_path / "run", tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    said = _train(str(path), "--out", str(out))
    assert "verify --replay" not in said
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
