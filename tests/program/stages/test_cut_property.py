"""Any small module, cut anywhere, is the module."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.program.capture import capture
from paceline.program.stages import cut
from tests.program.stages.pieces import assert_equal, pieces, run, serial

D = 4
Step = tuple[int, int, int]
"""Which operation, and which of the values before it reads."""


class Random(nn.Module):
    """Operations on values [B, D] that each read any two earlier ones."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.linear = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        self.norm = nn.LayerNorm(D)
        self.words = nn.Embedding(D, D)
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("table", torch.linspace(0.5, 1.5, D))

    def operations(self) -> list[Callable[[Tensor, Tensor], Tensor]]:
        linear = self.linear
        return [
            lambda a, b: torch.tanh(linear[0](a)) + b,
            lambda a, b: linear[1](a) * torch.sigmoid(b),
            lambda a, b: F.linear(a, self.words.weight) - 0.5 * b,
            lambda a, b: self.norm(a + b),
            lambda a, b: torch.where(a > 0, a * self.scale, b),
            lambda a, b: self.words(a.argmax(1)) + b,
            lambda a, b: b.gather(1, torch.argsort(a, 1)),
            lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1) * self.table,
            lambda a, b: (a.unsqueeze(2) @ b.softmax(1).unsqueeze(1)).transpose(1, 2).mean(2),
            lambda a, b: checkpoint(lambda a, b: torch.tanh(linear[2](a)).exp() - b, a, b, use_reentrant=False),
            lambda a, b: a.detach() * b.split(2, 1)[0].repeat(1, 2),
            lambda a, b: a.view(-1, 2, 2).permute(0, 2, 1).reshape(-1, D) + torch.roll(b, 1, 1),
        ]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values, operations = [x], self.operations()
        for which, one, other in self.steps:
            read = values[-1 - one % len(values)], values[-1 - other % len(values)]
            values.append(operations[which](*read))
        return F.mse_loss(values[-1] + self.linear[0](values[len(values) // 2]), y)


@settings(max_examples=20)
@given(
    steps=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9),
    count=st.integers(2, 4),
    seed=st.integers(0, 1 << 16),
    split=st.booleans(),
)
def test_random_modules_cut_at_random_are_whole(steps: list[Step], count: int, seed: int, split: bool) -> None:
    torch.manual_seed(0)
    module = Random(steps).double().train()
    batch = tuple(torch.randn(2, 4, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    batches = pieces(batch, [2, 2])
    program = capture(module, batches[0])

    def seconds_of(node: torch.fx.Node) -> float:
        """Any cut is the best for some lengths of calls."""
        return float(zlib.crc32(f"{seed} {node.name}".encode()) % 7)

    pipeline = cut(program, count, split_backward=split, seconds_of=seconds_of)
    assert_equal(run(program, pipeline, module, batches, split=split), serial(module, batch))
