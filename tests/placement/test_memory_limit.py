"""A limit of what a rank holds: norms and residuals are split along time, as Megatron does."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PlacementError
from paceline.placement.place import place
from paceline.placement.redistribute import collective_of, is_redistribution, redistribution_of
from paceline.plan import Mesh, Plan
from paceline.program.capture import capture
from paceline.program.program import Program
from paceline.runtime.module import place_in_process
from paceline.runtime.step import Step


class Layers(nn.Module):
    """Residual layers over tokens, of which norms and residuals weigh more than products."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.relu(up(norm(x))))
        return x.square().mean()


def _batch() -> tuple[Tensor]:
    return (torch.randint(64, (4, 64)),)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(Layers().double(), _batch())


def _moves(program: Program, memory_bytes: int | None) -> Counter[str]:
    placed = place(program, Plan(Mesh.parse("tp=2"), memory_bytes=memory_bytes))
    nodes = [node for node in placed.program.graph.nodes if is_redistribution(node) and not node.meta["backward"]]
    kinds = [collective_of(*redistribution_of(node)[1:3]) for node in nodes]
    return Counter(kind.value for kind in kinds if kind is not None)


def _least(program: Program) -> int:
    """Return what the error for too little memory says would do."""
    with pytest.raises(PlacementError, match="need at least") as error:
        place(program, Plan(Mesh.parse("tp=2"), memory_bytes=1 << 10))
    return int(str(error.value).rpartition("at least ")[2].split(" ")[0].replace(",", ""))


def test_norms_are_split_along_time_when_memory_asks_for_it(program: Program) -> None:
    unlimited = _moves(program, None)
    assert unlimited == _moves(program, 1 << 30), "a limit that does not bind changes nothing"
    limited = _moves(program, int(_least(program) * 1.02))
    assert unlimited["all_reduce"] and not unlimited["reduce_scatter"]
    assert limited["reduce_scatter"] >= 2 and limited["all_gather"] > unlimited["all_gather"]


def test_a_limited_plan_equals_the_serial_module(program: Program) -> None:
    module, batch = Layers().double(), _batch()
    serial = copy.deepcopy(module)
    serial(*batch).backward()
    memory = int(_least(program) * 1.05)
    limited = place_in_process(program, module, batch, Plan(Mesh.parse("tp=2"), memory_bytes=memory))
    kept = place_in_process(program, copy.deepcopy(serial), batch, Plan(Mesh.parse("tp=2")))
    loss = limited(*batch)
    loss.backward()
    for shard in limited.shards():
        gradient = dict(serial.named_parameters())[shard.name].grad
        assert gradient is not None and shard.tensor.grad is not None
        for patch in shard.patches:
            ours = shard.tensor.grad[patch.local.index]
            assert torch.allclose(ours, gradient[patch.whole.index], rtol=0, atol=1e-9 * float(gradient.abs().max()))

    def saved(step: Step) -> int:
        (output,) = step.forward.find_nodes(op="output")
        return sum(node.meta["val"].numel() for node in output.args[0][len(step.outputs) :])

    assert saved(limited.step(*batch)) < saved(kept.step(*batch))
