"""Images and sequences that are split along height, width and time: whole models, equal to serial."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.bench.operators.unet import UNet
from paceline.placement.place import place
from paceline.placement.placements import Shard
from paceline.placement.redistribute import is_redistribution, redistribution_of
from paceline.placement.windows import window, window_sum
from paceline.plan import Mesh, Plan
from paceline.program.capture import capture
from paceline.runtime.module import parallelize
from tests.ranks import ranks


class Pictures(nn.Module):
    """Every way in which rows meet: strides, dilation, groups, borders, norms, pools, resizing, shifts, cuts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2, padding_mode="reflect")
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.groups = nn.GroupNorm(3, 12)
        self.up = nn.ConvTranspose2d(12, 8, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))  # [B, 8, 12, 12]
        kept = self.deep(x)
        x = F.max_pool2d(kept, 3, stride=1, padding=1)
        x = self.up(F.gelu(self.groups(self.down(x))))
        x = F.avg_pool2d(x, 3, stride=1, padding=1) + x.roll((1, -2), (2, 3))
        x = F.pad(x, (1, 1, 3, 3))[:, :, 2:14, 1:13]
        x = self.last(torch.cat([x, kept], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return F.cross_entropy(x, y) + F.interpolate(x, scale_factor=2).flip(2)[:, :, ::4].square().mean()


def pictures() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return Pictures().double(), (torch.randn(4, 3, 24, 24).double(), torch.randint(4, (4, 24, 24)))


class Sounds(nn.Module):
    """Causal convolutions over time, pooled, and compared with what was a step ago."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.Conv1d(8, 8, 4, groups=8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))  # [B, 8, 12]
        x = F.silu(self.second(F.pad(x, (3, 0))))
        x = F.max_pool1d(x, 3, stride=1, padding=1)
        before = F.pad(x, (1, -1))
        return self.last((x - before).transpose(1, 2)).square().mean()


def sounds() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(1)
    return Sounds().double(), (torch.randn(4, 4, 24).double(),)


def assert_equal(built: tuple[nn.Module, Any], mesh: str, *, devices: list[str] | None) -> None:
    module, batch = built
    serial = copy.deepcopy(module)
    parallel = parallelize(module, batch, Plan(Mesh.parse(mesh)), devices=devices)
    loss, expected = parallel(*batch), serial(*batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    found = 0
    for shard in parallel.shards():
        if shard.is_parameter:
            gradient = serial.get_parameter(shard.name).grad
            assert gradient is not None and shard.tensor.grad is not None
            for patch in shard.patches:
                mine, theirs = shard.tensor.grad[patch.local.index], gradient[patch.whole.index]
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
                found += 1
    assert found


@pytest.mark.parametrize("mesh", ["hw=2", "hw=4", "dp=2,hw=2", "hw=2,tp=2", "sp=2,hw=2"])
def test_pictures(mesh: str) -> None:
    assert_equal(pictures(), mesh, devices=["cpu"])


@pytest.mark.parametrize("mesh", ["sp=2", "fsdp=2,sp=2", "sp=2,tp=2"])
def test_sounds(mesh: str) -> None:
    assert_equal(sounds(), mesh, devices=["cpu"])


@ranks(3)
def test_over_processes() -> None:
    assert_equal(pictures(), "hw=3", devices=None)
    assert_equal(sounds(), "sp=3", devices=None)


@ranks(2, backend="gloo")
def test_over_processes_by_sockets() -> None:
    assert_equal(pictures(), "hw=2", devices=None)


def test_neighbours_exchange_rows_and_no_picture_is_gathered() -> None:
    batch = {"pixels": torch.randn(2, 3, 16, 16), "labels": torch.randint(3, (2, 16, 16))}
    program = place(capture(UNet(width=4, levels=3, classes=3), batch), Mesh.parse("hw=2")).program
    moves = [redistribution_of(node)[1:3] for node in program.graph.nodes if is_redistribution(node)]
    assert moves and not any(isinstance(source, Shard) for source, _ in moves)
    windows = [node for node in program.graph.nodes if node.target in (window, window_sum)]
    assert windows and {node.args[1] for node in windows} == {2}  # rows lie together, columns do not
