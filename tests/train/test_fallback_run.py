"""A run from a recipe whose module cannot be captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.errors import CaptureError, RecipeError
from paceline.train.metrics import read_metrics
from paceline.train.recipe import load_recipe
from paceline.train.run import train
from tests.train.on_ranks import train_on

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens, targets):
        hidden = self.enter(tokens)
        if (tokens == 0).any():  # the user's line
            hidden = 2 * hidden
        return nn.functional.cross_entropy(self.leave(hidden).flatten(0, 1), targets.flatten())

def build():
    return Net(), {}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "text.txt").write_text("def add(first, second):\n    return first + second\n\n" * 12)
    values = {
        "name": "gated",
        "model": {"factory": f"{tmp_path}/net.py:build"},
        "data": {
            "source": "text",
            "files": str(tmp_path / "text.txt"),
            "sequence": 16,
            "keys": ["tokens", "targets"],
            "validation": 0.2,
        },
        "precision": "float64",
        "train": {"epochs": 1, "batch": 8, "micro_batches": 2, "validate": {"every": 2}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_two_ranks_train_as_one_does_and_the_run_says_what_it_is(recipe: Path, tmp_path: Path, capsys):
    with pytest.raises(CaptureError, match="the user's line"):
        train(load_recipe(recipe), tmp_path / "refused")
    train(load_recipe(recipe, ["fallback=ddp"]), tmp_path / "serial")
    assert "it runs under fallback 'ddp'" in capsys.readouterr().out

    out = tmp_path / "two"
    train_on(2, recipe, out, "fallback=fsdp2", "mesh=fsdp=2")
    assert "taking fallback='fsdp2'" in (out / "logs" / "rank-0.log").read_text()
    assert "enter.weight: '[256, 8] S0'" in (out / "plan.yaml").read_text()
    losses = [[row["loss"] for row in read_metrics(run / "metrics.jsonl")] for run in (tmp_path / "serial", out)]
    assert losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-9)
    weights = [load_file(run / "model.safetensors") for run in (tmp_path / "serial", out)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-7, atol=1e-9, msg=name)


def test_a_fallback_that_does_not_fit_the_mesh_is_a_fault_of_the_recipe(recipe: Path):
    with pytest.raises(RecipeError, match="Use the mesh 'fsdp=2', or fallback 'ddp'"):
        load_recipe(recipe, ["fallback=fsdp2", "mesh=dp=2"])
