"""A U-Net in plain PyTorch: what is trained to label pixels, and what runs out of memory on large images.

Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015), with padded
convolutions and batch norm, as it is written today.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """`unet(pixels, labels)` is the mean cross-entropy in nats per pixel.

    Args:
        width: channels at full resolution; each level below has twice as many at half the resolution.
        levels: how many resolutions there are; height and width divide by 2 ** (levels - 1).
        classes: what a pixel may be.
    """

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.first = _two_convolutions(3, widths[0])
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _two_convolutions(above, below)) for above, below in pairwise(widths)
        )
        self.up = nn.ModuleList(_Up(below, above) for above, below in reversed([*pairwise(widths)]))
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The loss; pixels: [B, 3, H, W], labels: [B, H, W]."""
        kept = [self.first(pixels)]
        for down in self.down:
            kept.append(down(kept[-1]))
        x: Tensor = kept.pop()
        for up in self.up:
            x = up(x, kept.pop())
        return F.cross_entropy(self.last(x), labels)


class _Up(nn.Module):
    """Doubles the resolution and joins what the way down has kept of it."""

    def __init__(self, below: int, above: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(below, above, 2, stride=2)
        self.mix = _two_convolutions(2 * above, above)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """x: [B, 2C, H/2, W/2], kept: [B, C, H, W]; returns [B, C, H, W]."""
        mixed: Tensor = self.mix(torch.cat([kept, self.enlarge(x)], dim=1))
        return mixed


def _two_convolutions(given: int, made: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(given, made, 3, padding=1, bias=False),
        nn.BatchNorm2d(made),
        nn.ReLU(inplace=True),
        nn.Conv2d(made, made, 3, padding=1, bias=False),
        nn.BatchNorm2d(made),
        nn.ReLU(inplace=True),
    )
