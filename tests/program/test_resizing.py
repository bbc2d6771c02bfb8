"""Resizing stays one operator in a captured program, and PyTorch is afterwards as it was before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CaptureError
from paceline.program.capture import capture
from paceline.program.resizing import whole

aten = torch.ops.aten


class Resized(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.scale, self.how = nn.Parameter(torch.ones(())), how

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x * self.scale, **self.how).square().mean()


@pytest.mark.parametrize(
    ("mode", "shape", "name"),
    [
        ("nearest", (2, 3, 4), "upsample_nearest1d"),
        ("nearest", (2, 3, 4, 4), "upsample_nearest2d"),
        ("nearest-exact", (2, 3, 4, 4), "_upsample_nearest_exact2d"),
        ("linear", (2, 3, 4), "upsample_linear1d"),
        ("bilinear", (2, 3, 4, 4), "upsample_bilinear2d"),
        ("bicubic", (2, 3, 4, 4), "upsample_bicubic2d"),
        ("trilinear", (2, 3, 4, 4, 4), "upsample_trilinear3d"),
    ],
)
def test_it_is_one_operator_each_way(mode: str, shape: tuple[int, ...], name: str) -> None:
    for size in ({"scale_factor": 2}, {"size": (8,) * (len(shape) - 2)}):
        nodes = capture(Resized(mode=mode, **size), (torch.randn(shape),)).graph.nodes
        targets = [node.target for node in nodes]
        assert getattr(aten, name).default in targets and getattr(aten, f"{name}_backward").default in targets
        assert not {aten.index.Tensor, aten._unsafe_index.Tensor} & set(targets)


def test_pytorch_is_as_before() -> None:
    def kernels() -> list[Any]:
        operator = aten.upsample_bilinear2d
        return [dict(form.py_kernels) for form in (operator.vec, operator.default)]

    before = kernels()
    with whole():
        assert kernels() != before
    assert kernels() == before
    with pytest.raises(CaptureError):
        capture(Resized(mode="bilinear", scale_factor=2), (torch.randn(2, 3),))
    assert kernels() == before
