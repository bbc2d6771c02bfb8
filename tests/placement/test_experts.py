"""Mixtures of experts, split by expert, and a graph network, split by features or by nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.placement.place import place
from paceline.placement.placements import Shard
from paceline.plan import Mesh, Pin
from paceline.program.capture import capture
from paceline.program.program import Input, InputRole
from paceline.verify.run import verify

EXPERTS, WIDTH, TOKENS = 4, 32, 64


class Experts(nn.Module):
    """Each token goes to two experts, weighted."""

    def __init__(self, dispatch: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 8)
        self.dispatch = dispatch

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        made: Tensor = getattr(self, f"_{self.dispatch}")(x, weights, chosen)
        return (x + made).square().sum()

    def _dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every expert sees every token."""
        shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
        inside = F.silu(torch.einsum("nd,edf->enf", x, self.up))
        return torch.einsum("enf,efd,ne->nd", inside, self.down, shares)

    def _capacity(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Each expert takes as many tokens as it has room for, in their order."""
        room = len(x) // 2
        hot = F.one_hot(chosen, EXPERTS)
        places = hot.flatten(0, 1).cumsum(0).view_as(hot) - 1
        at = F.one_hot(places.clamp(0, room - 1), room) * ((places < room) * hot).unsqueeze(-1)
        taken = at.sum(1).to(x.dtype)
        given = torch.einsum("nk,nkec->nec", weights, at.to(x.dtype))
        inside = F.silu(torch.bmm(torch.einsum("nec,nd->ecd", taken, x), self.up))
        return torch.einsum("ecd,nec->nd", torch.bmm(inside, self.down), given)

    def _added(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Results of experts are added to the rows of their tokens."""
        made, rows = torch.zeros_like(x), torch.arange(len(x))
        for number in range(EXPERTS):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            result = F.silu(x[rows] @ self.up[number]) @ self.down[number]
            made = made.index_add(0, rows, share * result)
        return made


def experts(dispatch: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Experts(dispatch), (torch.randn(TOKENS, WIDTH),)


@pytest.mark.parametrize("dispatch", ["dense", "capacity", "added"])
def test_mixtures_of_experts_are_equal_to_serial(dispatch: str) -> None:
    report = verify(experts, "tp=2", arguments={"dispatch": dispatch}, steps=1, launch="inprocess")
    assert report.equal, report.to_json()
    assert not report.unknown_operators


@pytest.mark.parametrize("dispatch", ["dense", "capacity"])
def test_experts_are_what_is_split(dispatch: str) -> None:
    found = place(capture(*experts(dispatch)), Mesh.parse("tp=2")).placements
    for name in ("up", "down"):
        assert found[Input(InputRole.PARAMETER, name)] == (Shard(0),)


class Graph(nn.Module):
    """Messages along edges, their mean at each node."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(24, WIDTH)
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, edges: Tensor, nodes: Tensor, labels: Tensor) -> Tensor:
        x, (source, target) = self.nodes.weight, edges.unbind(1)
        count = torch.zeros(len(x), 1, dtype=x.dtype).scatter_add(0, target[:, None], torch.ones_like(x[target][:, :1]))
        for _ in range(2):
            messages = torch.relu(self.message(torch.cat([x[source], x[target]], -1)))
            x = x + self.update(torch.zeros_like(x).index_add(0, target, messages) / count.clamp(min=1))
        return F.cross_entropy(self.head(x[nodes]), labels)


def graph() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Graph(), (torch.randint(24, (40, 2)), torch.randint(24, (40,)), torch.randint(6, (40,)))


@pytest.mark.parametrize(("mesh", "rows"), [("auto=2", "S0"), ("tp=2", "S1")])
def test_graph_networks_are_equal_to_serial(mesh: str, rows: str) -> None:
    pins = (Pin("nodes.weight", {mesh.removesuffix("=2"): rows}),)
    report = verify(graph, mesh, steps=1, launch="inprocess", pins=pins)
    assert report.equal, report.to_json()
    assert not report.unknown_operators
