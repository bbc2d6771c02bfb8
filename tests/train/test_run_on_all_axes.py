"""A run on meshes with axes that split no samples learns what one rank learns, and goes on at other meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.train.metrics import read_metrics
from paceline.train.recipe import load_recipe
from paceline.train.run import train
from tests.train.on_ranks import train_on

GPT = Path(__file__).parents[2] / "recipes" / "gpt.py"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A tiny GPT, in float64, for one epoch whose last batch has 3 samples: two ranks take one each, one is left."""
    (tmp_path / "text.txt").write_text(("def add(first, second):\n    return first + second\n\n" * 12)[:400])
    values = {
        "name": "tiny",
        "model": {
            "factory": f"{GPT}:build",
            "args": {"width": 16, "layers": 1, "heads": 2, "context": 16},
        },
        "data": {
            "source": "text",
            "files": str(tmp_path / "text.txt"),
            "sequence": 16,
            "keys": ["tokens", "targets"],
        },
        "precision": "float64",
        "train": {"epochs": 1, "batch": 4, "clip": 0.5},
        "optimizer": {"name": "AdamW", "lr": 0.01},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def curve(out: Path) -> list[tuple[float, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in read_metrics(out / "metrics.jsonl")]


def test_ranks_train_checkpoint_and_go_on_at_another_mesh(recipe: Path, tmp_path: Path) -> None:
    serial, out = tmp_path / "serial", tmp_path / "run"
    train(load_recipe(recipe), serial)
    assert [row[3] for row in curve(serial)] == [64.0] * 5 + [48.0], "the last batch is the smaller one"
    train_on(4, recipe, out, "mesh=dp=2,tp=2", "train.epochs=null", "train.steps=3")
    assert "R, S" in yaml.safe_load((out / "plan.yaml").read_text())["placements"]["blocks.0.attention.qkv.weight"]
    train(load_recipe(recipe, ["mesh=sp=2,dp=2", "launch=inprocess"]), out, resume=True)
    assert curve(out) == [pytest.approx(row, rel=1e-9) for row in curve(serial)]
    ours, theirs = load_file(out / "model.safetensors"), load_file(serial / "model.safetensors")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
