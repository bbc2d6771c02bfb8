"""Checkpoints of placed modules: what one mesh saved goes on at any other as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.runtime.module import PlacedModule
from paceline.train.checkpoint import Checkpointer, export_checkpoint, load_safetensors
from tests.runtime.placed import give_gradients
from tests.runtime.test_state import WAYS, gradients, placed


def training(mesh: str, seed: int) -> tuple[PlacedModule, torch.optim.Optimizer]:
    module = placed(mesh, seed)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)


def train(module: PlacedModule, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        give_gradients(module, gradients(step))
        optimizer.step()
    return module.full_state_dict()


@pytest.fixture(scope="module")
def straight() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the serial module has learnt after two steps and after four."""
    it = training("serial", 0)
    return train(*it, range(2)), train(*it, range(2, 4))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("source", WAYS)
def test_a_checkpoint_goes_on_at_any_mesh(source: str, tmp_path: Path, straight: list[dict[str, Tensor]]) -> None:
    module, optimizer = training(source, 0)
    train(module, optimizer, range(2))
    Checkpointer(tmp_path, module, optimizer).save(2, {}, block=True)
    for target in WAYS:
        module, optimizer = training(target, 1)
        Checkpointer(tmp_path, module, optimizer).restore()
        assert_close(module.full_state_dict(), straight[0])
        assert_close(train(module, optimizer, range(2, 4)), straight[1])


def test_a_checkpoint_of_pieces_is_exported_and_loaded(tmp_path: Path, straight: list[dict[str, Tensor]]) -> None:
    module, optimizer = training("tp=2,fsdp=2", 0)
    train(module, optimizer, range(2))
    Checkpointer(tmp_path / "saves", module, optimizer).save(2, {}, block=True)
    export_checkpoint(tmp_path / "saves" / "step-00000002", tmp_path / "model.safetensors")
    other = placed("dp=2,tp=2", 1)
    load_safetensors(other, tmp_path / "model.safetensors")
    assert_close(other.full_state_dict(), straight[0])
