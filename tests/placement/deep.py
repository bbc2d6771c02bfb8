"""A GPT of any depth, to see what placing costs and whether it depends on the depth."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.program.capture import capture
from paceline.program.program import Program
from tests.placement.captured import Block


class DeepGpt(nn.Module):
    """Token and position embeddings, blocks, and a head that is tied to the token embedding."""

    def __init__(self, layers: int, d: int = 16, heads: int = 4, vocabulary: int = 32, time: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(time, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@cache
def deep_program(layers: int) -> Program:
    """Capture the model on four sequences; placing leaves a program as it is."""
    return capture(DeepGpt(layers), (torch.randint(0, 32, (4, 8)),))
