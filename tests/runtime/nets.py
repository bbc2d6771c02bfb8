"""A module with all that may be in one, serial and placed, and how they are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.plan import Mesh, Plan
from paceline.runtime.module import PlacedModule, parallelize
from tests.runtime.kept import kept_programs

DOUBLE = torch.float64
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Tied weights, dropout, buffers, a frozen part, one that the loss ignores, and parameters that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.ignored = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.norm(x.transpose(1, 2)).transpose(1, 2) * self.scale
        x = x + self.drop(self.down(torch.tanh(self.up(x)))) + self.frozen(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(size: int = 12, seed: int = 1) -> Batch:
    """Tokens, and labels of which very unequal numbers are valid."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(12, (size, 5), generator=generator)
    valid = torch.arange(5) < (torch.arange(size) % 6)[:, None]
    return tokens, torch.where(valid, tokens.roll(-1, 1), -100)


def pair(mesh: str, make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[nn.Module, PlacedModule]:
    """The serial module, and a copy of it split over a mesh in this process."""
    serial = make()
    plan = Plan(Mesh.parse(mesh)).with_(**options)
    with kept_programs():
        return serial, parallelize(copy.deepcopy(serial), batch(), plan, devices=["cpu"])


def user_name(name: str) -> str:
    """A parameter's name without the rank that holds it."""
    first, _, rest = name.partition(".")
    return rest if first.startswith("rank") else name


def whole_gradients(parallel: PlacedModule) -> dict[str, Tensor]:
    """Gather gradients as parameters are gathered: put them in their place for a moment."""
    values = {}
    for parameter in parallel.parameters():
        values[parameter] = parameter.detach().clone()
        parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    found = parallel.full_state_dict()
    for parameter, value in values.items():
        parameter.data.copy_(value)
    return found


def assert_gradients(serial: nn.Module, parallel: PlacedModule, tolerance: float = 1e-9) -> None:
    found = whole_gradients(parallel)
    for name, parameter in serial.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance, msg=name)


def step(module: nn.Module, given: Batch, seed: int) -> Tensor:
    if isinstance(module, PlacedModule):
        module.seed(seed)
    else:
        torch.manual_seed(seed)
    loss: Tensor = module(*given)
    loss.backward()
    return loss.detach()
