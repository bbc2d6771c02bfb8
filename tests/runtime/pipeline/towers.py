"""A module that is captured in no time, its pipelines, and what it gives serially."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.module import parallelize
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.pieces import micro_batch_seeds, micro_batches

WIDTH = 6
SYNCHRONOUS = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


class Layer(nn.Module):
    """A residual step; the skip is a connection that every cut crosses."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


class Tower(nn.Module):
    """Layers, and the mean cross-entropy over labels that count; the first and the last weight may be tied."""

    def __init__(self, layers: int = 8, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.layers[0].linear.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def tower(**options: Any) -> Tower:
    """A tower in float64 whose weights are the same each time."""
    torch.manual_seed(0)
    return Tower(**options).double()


def batch(size: int = 7, ignored: tuple[int, ...] = (0, 3), time: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Samples, of several times maybe, and labels; those named count for nothing."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(WIDTH, (size, *time), generator=generator)
    labels[list(ignored)] = -100
    return torch.randn(size, *time, WIDTH, generator=generator, dtype=torch.float64), labels


def pipelined(module: nn.Module, example: Any, mesh: str = "pp=2", **flow: Any) -> PipelinedModule:
    """The module with all ranks in this process; it stays as it is."""
    plan = Plan(Mesh.parse(mesh), pipeline=PipelinePlan(**flow))
    found = parallelize(copy.deepcopy(module), example, plan, devices=["cpu"])
    assert isinstance(found, PipelinedModule)
    return found


def gradients(module: PipelinedModule) -> dict[str, list[Tensor]]:
    """By parameter, the gradient of every copy; of whole parameters."""
    found: dict[str, list[Tensor]] = {}
    for shard in module.shards():
        if shard.is_parameter and shard.tensor.grad is not None:
            found.setdefault(shard.name, []).append(shard.tensor.grad)
    return found


def accumulated(
    module: nn.Module, given: tuple[Tensor, Tensor], count: int, seed: int, parts: int = 1
) -> tuple[float, nn.Module]:
    """Loss, and a module with gradients: micro-batches one after the other, weighted by the labels that count."""
    module = copy.deepcopy(module)
    pieces = micro_batches(given, count, parts)
    valid = [int((labels >= 0).sum()) for _, labels in pieces]
    total = 0.0
    for piece, counted, of_piece in zip(pieces, valid, micro_batch_seeds(seed, len(pieces)), strict=True):
        if counted:
            torch.manual_seed(of_piece)
            loss = module(*piece) * (counted / sum(valid))
            loss.backward()
            total += loss.item()
    return total, module


def assert_same_gradients(found: PipelinedModule, expected: nn.Module) -> None:
    """Every copy of every gradient is the serial one."""
    ours = gradients(found)
    assert ours.keys() == {name for name, p in expected.named_parameters() if p.grad is not None}
    for name, parameter in expected.named_parameters():
        for copied in ours.get(name, []):
            torch.testing.assert_close(copied, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
