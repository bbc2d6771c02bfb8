"""Models in plain PyTorch, as people write them: a U-Net, a language model with an LSTM, a graph network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.bench.families.family import BATCH, LABELS, SIDE, WORDS, Built, Family, images, tokens


class UNet(nn.Module):
    """Two levels down and up again: max pools, transposed convolutions, what was kept on the way down beside it."""

    def __init__(self, width: int = 8, labels: int = LABELS) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolutions(3, width), _convolutions(width, 2 * width)])
        self.bottom = _convolutions(2 * width, 4 * width)
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)]
        )
        self.up = nn.ModuleList([_convolutions(4 * width, 2 * width), _convolutions(2 * width, width)])
        self.head = nn.Conv2d(width, labels, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The loss; pixels: [B, 3, H, W], labels: [B, H, W]."""
        kept = []
        x = pixels
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([widen(x), kept.pop()], dim=1))
        return F.cross_entropy(self.head(x), labels)


def _convolutions(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.BatchNorm2d(outside),
        nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.BatchNorm2d(outside),
        nn.ReLU(),
    )


class LstmLanguageModel(nn.Module):
    """Two layers of LSTM between tied embeddings."""

    def __init__(self, words: int = WORDS, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of the next token; tokens: [B, T]."""
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits = self.head(self.dropout(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class GraphNetwork(nn.Module):
    """Messages along edges: of each graph its own (gather, scatter_add), and of a ring (index_select, index_add)."""

    ring: Tensor

    def __init__(self, nodes: int, features: int = 8, width: int = 16) -> None:
        super().__init__()
        self.inward = nn.Linear(features, width)
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.along_ring = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.outward = nn.Linear(width, 1)
        self.register_buffer("ring", torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes]))

    def forward(self, nodes: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        """The loss; nodes: [B, N, F], edges: [B, 2, E], target: [B]."""
        x = torch.relu(self.inward(nodes))
        source, sink = (edges[:, end, :, None].expand(-1, -1, x.shape[-1]) for end in (0, 1))  # [B, E, D]
        message = torch.relu(self.message(torch.cat([x.gather(1, source), x.gather(1, sink)], dim=-1)))
        received = torch.zeros_like(x).scatter_add(1, sink, message)
        degree = torch.zeros_like(x).scatter_add(1, sink, torch.ones_like(message))
        x = x + torch.relu(self.update(torch.cat([x, received / degree.clamp(min=1)], dim=-1)))
        x = self.norm(x.index_add(1, self.ring[1], self.along_ring(x.index_select(1, self.ring[0]))))
        return F.mse_loss(self.outward(x.mean(dim=1)).squeeze(-1), target)


def unet() -> Built:
    """Batch norm at every level."""
    return UNet(), {"pixels": images(), "labels": torch.randint(LABELS, (BATCH, SIDE, SIDE))}


def lstm() -> Built:
    """Dropout on."""
    return LstmLanguageModel(), {"tokens": tokens(time=8)}


def graph() -> Built:
    """Graphs of 12 nodes and 20 edges."""
    nodes, edges = 12, 20
    batch: dict[str, Any] = {
        "nodes": torch.randn(BATCH, nodes, 8),
        "edges": torch.randint(nodes, (BATCH, 2, edges)),
        "target": torch.randn(BATCH),
    }
    return GraphNetwork(nodes), batch


PLAIN = (
    Family("unet", "U-Net", unet, has_images=True),
    Family("lstm", "LSTM language model", lstm, has_time=True),
    Family("graph", "Graph network", graph),
)
