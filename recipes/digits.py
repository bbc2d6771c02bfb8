"""A small convolutional network for 8 x 8 images of handwritten digits, with batch norm. Plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


class DigitNet(nn.Module):
    """`net(images, labels)` is the mean cross-entropy; batch norm sees the global batch, however it is split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def logits(self, images: Tensor) -> Tensor:  # [B, 1, 8, 8] -> [B, 10]
        """Return a score for each digit."""
        return self.head(self.features(images).mean(dim=(2, 3)))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:  # [B, 1, 8, 8], [B] -> []
        """Return the loss, which is what Paceline trains."""
        return F.cross_entropy(self.logits(images), labels)


def build(width: int = 16, batch: int = 64) -> tuple[DigitNet, dict[str, Tensor]]:
    """The factory: a fresh module, and a batch of the form it is called with."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(batch, 1, 8, 8, generator=random)
    return DigitNet(width), {"images": images, "labels": torch.randint(CLASSES, (batch,), generator=random)}
