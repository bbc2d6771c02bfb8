from __future__ import annotations

import resource

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import RecipeError
from paceline.program.capture import capture
from paceline.program.fake import is_fake
from paceline.program.without_data import build_without_data
from tests import models


class _Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).square().mean()


def _wide(width: int) -> tuple[nn.Module, tuple[Tensor]]:
    return _Wide(width).to(torch.bfloat16), (torch.randn(4, width, dtype=torch.bfloat16),)


def test_what_no_machine_could_hold_is_built_converted_and_captured() -> None:
    module, batch = build_without_data(_wide, {"width": 2_000_000}, 0)
    assert sum(p.nbytes for p in module.parameters()) > 8e12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # kilobytes
    assert module.first.weight.dtype == torch.bfloat16
    assert module.last.weight is module.first.weight
    assert capture(module, batch).aliases == {"last.weight": "first.weight"}


def test_factories_by_name_are_built_without_data() -> None:
    module, batch = build_without_data("tests.models:llama", {}, 0)
    assert all(is_fake(tensor) for tensor in [*module.parameters(), *module.buffers()])
    program = capture(module, batch)
    real = capture(*models.llama())
    assert [str(node.target) for node in program.graph.nodes] == [str(node.target) for node in real.graph.nodes]


def test_a_factory_that_reads_data_is_called_as_it_is_and_the_user_is_told() -> None:
    def reads() -> tuple[nn.Module, tuple[Tensor]]:
        module = nn.Linear(2, 2)
        assert module.weight.sum().item() < 100
        return module, (torch.zeros(2, 2),)

    told: list[str] = []
    module, _ = build_without_data(reads, {}, 0, tell=told.append)
    assert not is_fake(module.weight)
    assert len(told) == 1 and "needs the data of its tensors" in told[0]


def test_a_factory_that_fails_anyway_says_so_as_ever() -> None:
    def fails() -> None:
        raise ValueError("nothing here")

    with pytest.raises(RecipeError, match="nothing here"):
        build_without_data(fails, {}, 0)
