"""Parameters that arrive while the forward pass runs: each is waited for before it is read, and not sooner."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.plan import Mesh, Plan
from paceline.runtime.arrivals import order_of_use
from paceline.runtime.module import PlacedModule, parallelize


class Layers(nn.Module):
    """Used in another order than they are made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(6, 4)
        self.first = nn.Linear(5, 6)
        self.table = nn.Embedding(7, 5)

    def forward(self, keys: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(torch.relu(self.first(self.table(keys)))), labels)


BATCH = (torch.tensor([0, 3, 6, 3]), torch.tensor([1, 0, 3, 2]))
ORDER = ["table.weight", "first.weight", "first.bias", "last.weight", "last.bias"]


@pytest.mark.parametrize("mesh", ["serial", "dp=2"])
def test_parameters_are_filled_as_they_are_read(mesh: str) -> None:
    serial = Layers()
    wanted = serial(*BATCH)
    wanted.backward()
    net = parallelize(copy.deepcopy(serial), BATCH, Plan(Mesh.parse(mesh)), devices=["cpu"])
    assert isinstance(net, PlacedModule)
    pieces: dict[str, list[Tensor]] = {}
    for name, parameter in net.named_parameters():
        pieces.setdefault(name.removeprefix("rank0.").removeprefix("rank1."), []).append(parameter)
        parameter.data.fill_(torch.nan)
    asked: list[str] = []

    def arrived(name: str) -> None:
        asked.append(name)
        for piece in pieces[name]:
            piece.data.copy_(serial.get_parameter(name).data)

    net.arrival = arrived
    loss = net(*BATCH)
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    for name, parameter in serial.named_parameters():
        assert parameter.grad is not None
        for piece in pieces[name]:
            torch.testing.assert_close(piece.grad, parameter.grad)
    seen = list(dict.fromkeys(asked))
    assert set(seen) == set(ORDER)
    assert seen[0] == "table.weight"
    assert seen.index("first.weight") < seen.index("last.weight")
    assert [name for name in order_of_use(net.step(*BATCH)) if name in ORDER] == seen
