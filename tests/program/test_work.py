from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from paceline.program.capture import capture
from paceline.program.program import Program
from paceline.program.work import CallKind, guesses, work_of
from tests import models


def _calls(program: Program, name: str) -> list[Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and name in str(node.target)]


def _flops(program: Program) -> float:
    return sum(work_of(node).flops for node in program.graph.nodes)


class _Convolutions(nn.Module):
    """A plain, a strided and a transposed one, whose weights look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, padding=1)
        self.strided = nn.Conv2d(8, 8, 3, stride=2)
        self.transposed = nn.ConvTranspose2d(8, 8, 4, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.transposed(self.strided(self.plain(x))).square().mean()


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.weight = nn.Parameter(torch.zeros(5, 12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x.mean(), self.first(x), self.weight).square().mean()


@pytest.mark.parametrize(
    ("module", "batch"),
    [(_Convolutions(), (torch.zeros(2, 3, 8, 8),)), (_Products(), (torch.zeros(5, 4, 8),))],
    ids=["convolutions", "products"],
)
def test_flops_are_those_that_torch_counts_while_it_computes(module: nn.Module, batch: tuple[Tensor, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        module(*batch).backward()
    assert _flops(capture(module, batch)) == counter.get_total_flops()


def test_a_grouped_convolution_meets_its_own_group_alone_forward_and_backward() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(8, 12, 3, groups=4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.convolution(x).sum()

    program = capture(Grouped(), (torch.zeros(2, 8, 6, 6),))
    forward = 2 * (2 * 4 * 4) * 12 * (2 * 9)
    # The gradient of the batch is not asked for: backward there is that of the weight alone.
    assert [work_of(node).flops for node in _calls(program, "aten.convolution")] == [forward, forward]
    assert [work_of(node).times for node in _calls(program, "aten.convolution")] == [4, 4]


def test_flops_of_a_language_model_are_those_of_its_layers() -> None:
    module, batch = models.llama()
    tokens, attention = models.BATCH * models.TIME, models.BATCH * 4 * models.TIME**2 * 6
    matrices = sum(p.numel() for name, p in module.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert _flops(capture(module, batch)) == 6 * tokens * matrices + 2 * (4 + 10) * attention


def test_attention_says_whether_queries_see_earlier_keys_alone() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            causal = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            return (causal + F.scaled_dot_product_attention(x, x, x)).sum()

    calls = _calls(capture(Attends(), (torch.zeros(2, 3, 8, 4),)), "_scaled_dot_product")
    found = [work_of(node) for node in calls]
    assert [work.kind for work in found] == [CallKind.ATTENTION] * 4
    assert sorted(work.operations.causal for work in found if work.operations) == [False, False, True, True]
    assert {(work.dims, work.times, work.flops) for work in found} == {
        ((8, 8, 4), 6, 4.0 * 6 * 8 * 8 * 4),
        ((8, 8, 4), 6, 10.0 * 6 * 8 * 8 * 4),
    }


def test_a_gather_reads_what_it_takes_and_not_the_table() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum()

    (node,) = _calls(capture(Looks(), (torch.zeros(3, dtype=torch.long),)), "aten.embedding.default")
    assert work_of(node).read_bytes == 3 * 4 * 4 + 3 * 8
    assert work_of(node).written_bytes == 3 * 4 * 4
    (back,) = _calls(capture(Looks(), (torch.zeros(3, dtype=torch.long),)), "embedding_dense_backward")
    assert work_of(back).written_bytes == 1000 * 4 * 4


def test_views_are_free_and_what_is_expanded_is_read_once() -> None:
    class Widens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight.expand(4, 6).t() * x.t()).sum()

    program = capture(Widens(), (torch.zeros(4, 6),))
    assert all(work_of(node).view for node in [*_calls(program, "expand"), *_calls(program, "aten.t.")])
    first = _calls(program, "aten.mul")[0]
    assert work_of(first).read_bytes == (6 + 24) * 4


def test_an_operator_on_matrices_that_nobody_knows_is_guessed_and_named() -> None:
    class Measures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.cdist(x, self.weight)).sum()

    program = capture(Measures(), (torch.zeros(4, 4),))
    assert guesses([program.graph]) == ["aten._cdist_backward.default", "aten._cdist_forward.default"]
    (node,) = _calls(program, "cdist_forward")
    assert work_of(node).flops == 2 * 4**3
