"""A run on stages learns what one rank learns, and goes on without stages; and the other way round."""

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
    """A tiny GPT with tied embeddings, in float64; the last batch has 3 samples: micro-batches of 2 and 1."""
    (tmp_path / "text.txt").write_text(("def add(first, second):\n    return first + second\n\n" * 12)[:340])
    values = {
        "name": "tiny",
        "model": {
            "factory": f"{GPT}:build",
            "args": {"width": 16, "layers": 2, "heads": 2, "context": 16, "tied": True},
        },
        "data": {
            "source": "text",
            "files": str(tmp_path / "text.txt"),
            "sequence": 16,
            "keys": ["tokens", "targets"],
        },
        "precision": "float64",
        "train": {"epochs": 1, "batch": 4, "micro_batches": 2, "clip": 0.5},
        "optimizer": {"name": "AdamW", "lr": 0.01},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def curve(out: Path) -> list[tuple[float, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in read_metrics(out / "metrics.jsonl")]


def test_stages_train_checkpoint_and_go_on_without_and_with(recipe: Path, tmp_path: Path) -> None:
    serial, out, back = tmp_path / "serial", tmp_path / "run", tmp_path / "back"
    train(load_recipe(recipe), serial)
    assert len(curve(serial)) > 3
    first = ["train.epochs=null", "train.steps=2"]
    train_on(2, recipe, out, "mesh=pp=2", *first)
    assert len(curve(out)) == 2, "rank 0, which has no loss of its own, writes it"
    train(load_recipe(recipe, ["mesh=dp=2", "launch=inprocess"]), out, resume=True)
    train(load_recipe(recipe, ["mesh=dp=2", "launch=inprocess", *first]), back)
    train(load_recipe(recipe, ["mesh=pp=2", "launch=inprocess", "plan.pipeline.schedule=zb-v"]), back, resume=True)
    theirs = load_file(serial / "model.safetensors")
    for run in (out, back):
        assert curve(run) == [pytest.approx(row, rel=1e-9) for row in curve(serial)]
        ours = load_file(run / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
