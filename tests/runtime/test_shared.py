"""Placed programs on ranks that share memory: where their tensors lie, and what happens when these are replaced."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.plan import Mesh, Plan
from paceline.runtime.binding import Bound, bind
from paceline.runtime.executor import ProcessExecutor
from paceline.runtime.job.world import World
from paceline.runtime.module import PlacedModule, parallelize
from paceline.runtime.shared import whole_of
from paceline.shm import Exchange
from tests.ranks import ranks

aten = torch.ops.aten


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.second(self.first(x).relu()), y)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 16).double(), torch.randn(8, 16).double()


def placed(mesh: Mesh) -> PlacedModule:
    return parallelize(Layers().double(), batch(), Plan(mesh))


def exchange_of(module: PlacedModule, axis: str) -> Exchange:
    executor: Any = module._peers.executor
    assert isinstance(executor, ProcessExecutor)
    found = executor._groups[axis].shared
    if found is None:
        pytest.skip("there is no compiler here: ranks share memory in pure Python")
    return found


def train(module: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(*batch())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def bound_backward(module: PlacedModule) -> Bound:
    step = module.step(*batch())
    executor: Any = module._peers.executor
    assert step.backward is not None
    return bind(step.backward, step.constants, executor._groups, functional=False)


def called(module: Bound) -> list[str]:
    return [str(node.target) for node in module.graph.nodes]


@ranks(mesh="dp=2")
def test_products_write_gradients_into_the_bucket(mesh: Mesh) -> None:
    module = placed(mesh)
    exchange_of(module, "dp")
    backward = bound_backward(module)
    weights = [node for node in backward.graph.nodes if node.target is aten.mm.out]
    assert len(weights) == 2
    assert not any(node.target is aten.cat.default for node in backward.graph.nodes)
    assert called(backward).count("room_float64_dp") == 1


@ranks(mesh="fsdp=2")
def test_a_split_parameter_is_one_tensor_of_all_ranks(mesh: Mesh, world: World) -> None:
    module = placed(mesh)
    exchange = exchange_of(module, "fsdp")
    serial = dict(Layers().double().named_parameters())
    for shard in module.shards():
        whole = whole_of(shard.tensor.detach().reshape(-1), exchange)
        assert whole is not None
        dist.barrier()  # everybody has laid out its row
        assert torch.equal(whole.reshape(-1), serial[shard.name].detach().reshape(-1))
        assert whole[world.rank].data_ptr() == shard.tensor.data_ptr()


@ranks(mesh="fsdp=2")
def test_graphs_that_look_at_parameters_stand_between_fences(mesh: Mesh) -> None:
    module = placed(mesh)
    exchange_of(module, "fsdp")
    calls = [name for name in called(bound_backward(module)) if name in ("fence_fsdp", "all_gather_fsdp", "output")]
    assert calls[0] == "fence_fsdp" and calls[-2:] == ["fence_fsdp", "output"]
    assert "all_gather_fsdp" in calls


@ranks(mesh="fsdp=2")
def test_a_parameter_that_was_replaced_is_gathered_as_any_tensor(mesh: Mesh) -> None:
    expected = train(Layers().double())
    module = placed(mesh)
    exchange = exchange_of(module, "fsdp")
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
        assert whole_of(parameter.detach().reshape(-1), exchange) is None
    assert train(module) == pytest.approx(expected, rel=1e-12)


@ranks(mesh="fsdp=2")
def test_changes_between_steps_are_seen_by_all(mesh: Mesh) -> None:
    serial = Layers().double()
    module = placed(mesh)
    exchange_of(module, "fsdp")
    for _ in range(3):
        with torch.no_grad():
            for parameter in (*module.parameters(), *serial.parameters()):
                parameter.mul_(0.5)
            assert float(module(*batch())) == pytest.approx(float(serial(*batch())), rel=1e-12)


@ranks(mesh="fsdp=2")
def test_memory_is_given_back_when_the_last_rank_lets_go(mesh: Mesh, world: World) -> None:
    module: PlacedModule | None = placed(mesh)
    assert module is not None
    arena = exchange_of(module, "fsdp")
    held = arena.bytes_in_use()
    rows = [shard.tensor.detach() for shard in module.shards()]
    kept = [row.clone() for row in rows]
    if world.rank == 0:  # the owner of the memory lets go first
        del rows
        module = None
        gc.collect()
    dist.barrier()
    other = copy.deepcopy(placed(mesh).full_state_dict())  # a second module, in whatever memory is free
    assert other
    if world.rank == 1:
        assert all(torch.equal(row, before) for row, before in zip(rows, kept, strict=True))
        del rows
        module = None
    gc.collect()
    dist.barrier()
    assert arena.bytes_in_use() <= held
