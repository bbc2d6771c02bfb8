"""A model and data for runs with servers: three classes of points, learnt in a few steps."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.outer = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [B, 8], [B] -> []
        return F.cross_entropy(self.outer(torch.tanh(self.inner(x))), y)


class Clicks(nn.Module):
    """A table of words beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:  # [B, 3], [B] -> []
        return F.cross_entropy(self.head(self.words(ids).sum(1)), y)


class Votes(nn.Module):
    """Every word votes on the classes, weighed by its place: a table, and a dense matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1, 3)
        self.weights = nn.Parameter(torch.ones(3, 3))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:  # [B, 3], [B] -> []
        return F.cross_entropy((self.words(ids) * self.weights).sum(1), y)


class Points:
    def __init__(self, count: int) -> None:
        random = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=random)
        self.y = (self.x[:, :3] + 0.1 * torch.randn(count, 3, generator=random)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(float(os.environ.get("TOY_SLEEP_S", "0")))
        return {"x": self.x[index], "y": self.y[index]}


class Words(Points):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        signs = (self.x[index, :3] > 0).long()
        return {"ids": torch.arange(3) * 1000 + signs, "y": self.y[index]}


class Pure(Points):
    """Every word is of one class: `Votes` begins with words of zeros, and no gradient ever changes its sign.

    A word's vote for its class only rises, and that for others only falls, and so weights only rise: in any order of
    updates, however old they are, and in averages of what groups have learnt.
    """

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        y = super().__getitem__(index)["y"]
        return {"ids": torch.arange(3) * 1000 + y, "y": y}


class Rotten(Points):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 77:
            raise ValueError("sample 77 is rotten")
        return super().__getitem__(index)


def build(width: int = 16) -> tuple[nn.Module, dict[str, Tensor]]:
    return Net(width), {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.long)}


def build_clicks() -> tuple[nn.Module, dict[str, Tensor]]:
    return Clicks(), {"ids": torch.zeros(4, 3, dtype=torch.long), "y": torch.zeros(4, dtype=torch.long)}


def build_votes() -> tuple[nn.Module, dict[str, Tensor]]:
    return Votes(), {"ids": torch.zeros(4, 3, dtype=torch.long), "y": torch.zeros(4, dtype=torch.long)}


def points(count: int = 200) -> Points:
    return Points(count)


def words(count: int = 200) -> Words:
    return Words(count)


def pure(count: int = 200) -> Pure:
    return Pure(count)


def rotten(count: int = 200) -> Rotten:
    return Rotten(count)
