"""What the dimensions of batch inputs mean, told by shapes, types and readers alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.placement.dimensions import dimensions
from paceline.program.capture import capture

B, T, H, W = 2, 6, 8, 10


class Reads(nn.Module):
    """Reads its inputs in some way."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.read = read

    def forward(self, **batch: Tensor) -> Tensor:
        return self.read(**batch) * self.weight


def added(**batch: Tensor) -> Tensor:
    return torch.stack([x.float().sum() for x in batch.values()]).sum()


def convolved(x: Tensor, **others: Tensor) -> Tensor:
    """By a kernel of ones that sees one place."""
    kernel = torch.ones(1, x.shape[1], *[1] * (x.ndim - 2))
    convolution = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[x.ndim]
    return convolution(x, kernel).sum() + (added(**others) if others else 0)


def sound(x: Tensor) -> Tensor:
    return convolved(x.unsqueeze(1))


def ints(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


CASES = {
    "tokens, masks and labels": (added, {"ids": ints(B, T), "mask": ints(B, T) > 0, "y": ints(B)}, ["BT", "BT", "B"]),
    "a mask of numbers": (added, {"ids": ints(B, T), "mask": torch.ones(B, T)}, ["BT", "BT"]),
    "a target of numbers": (added, {"ids": ints(B, T), "y": torch.ones(B, 3)}, ["BT", "B."]),
    "masks of attention": (added, {"ids": ints(B, T), "mask": torch.ones(B, 1, T, T)}, ["BT", "B.T."]),
    "positions for all samples": (added, {"ids": ints(B, T), "at": ints(1, T)}, ["BT", ".T"]),
    "positions of three kinds": (added, {"ids": ints(B, T), "at": ints(3, B, T)}, ["BT", "..T"]),
    "features over time": (added, {"x": torch.ones(B, T, 3)}, ["BT."]),
    "features that are convolved": (convolved, {"x": torch.ones(B, 3, T)}, ["B.T"]),
    "samples of sound": (sound, {"x": torch.ones(B, T)}, ["BT"]),
    "images and maps": (
        added,
        {"x": torch.ones(B, 3, H, W), "labels": ints(B, H, W), "mask": ints(B, 1, H, W), "depth": torch.ones(B, H, W)},
        ["B.HW", "BHW", "B.HW", "BHW"],
    ),
    "images as high as a text is long": (convolved, {"x": torch.ones(B, 3, T, T), "ids": ints(B, T)}, ["B.HW", "BT"]),
    "volumes": (convolved, {"x": torch.ones(B, 3, T, H, W)}, ["B.THW"]),
    "videos": (added, {"x": torch.ones(B, T, 3, H, W)}, ["BT.HW"]),
}


@pytest.mark.parametrize("name", CASES)
def test_meaning(name: str) -> None:
    read, batch, expected = CASES[name]
    found = dimensions(capture(Reads(read), batch))
    letters = {item.name: "".join(what.name[0] if what else "." for what in meaning) for item, meaning in found.items()}
    assert letters == dict(zip(batch, expected, strict=True))
