"""Calls keep the number that autograd gives to what it differentiates as one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from paceline.program.capture import capture
from paceline.program.precision import lift
from paceline.program.program import Output, OutputRole, Program

aten = torch.ops.aten
WORDS, D = 3000, 8


class Tied(nn.Module):
    """A tied embedding, a norm, a residual sum, and logits enough to be taken in few passes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.norm = nn.LayerNorm(D)
        self.inner = nn.Linear(D, D)
        self.head = nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + torch.tanh(self.inner(self.norm(x)))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(Tied(), (torch.randint(0, WORDS, (4, 8)),))


def one(program: Program, target: object) -> Node:
    (node,) = [node for node in program.graph.nodes if node.target is target]
    return node


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (aten.embedding.default, aten.embedding_dense_backward.default),
        (aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
        (aten.tanh.default, aten.tanh_backward.default),
    ],
)
def test_a_call_and_its_backward_call_have_one_number(program: Program, forward: object, backward: object) -> None:
    for seen in (program, lift(program)):
        number = one(seen, forward).meta["sequence"]
        assert isinstance(number, int)
        assert one(seen, backward).meta["sequence"] == number


def test_sums_of_gradients_have_none(program: Program) -> None:
    sums = [node for node in program.graph.nodes if node.target is aten.add.Tensor and node.meta["backward"]]
    tied = dict(zip(program.outputs, program.results, strict=True))[Output(OutputRole.GRADIENT, "words.weight")]
    assert len(sums) == 2 and tied in sums
    assert [node.meta["sequence"] for node in sums] == [None, None]


def test_rewritten_losses_keep_theirs(program: Program) -> None:
    gradient = one(program, torch.ops.paceline.cross_entropy_grad.default)
    numbers = {node.meta["sequence"] for node in program.graph.nodes if not node.meta.get("backward")}
    assert gradient.meta["sequence"] in numbers
    assert all("sequence" in node.meta for node in program.graph.nodes if node.op == "call_function")
