"""Placed programs compiled with Inductor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.placement.placements import Shard
from paceline.plan import Mesh, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize
from tests.ranks import ranks

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="Inductor needs a C++ compiler (g++ or clang++) on the PATH")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(x)))).square().mean()


X = torch.linspace(-1, 1, 32).view(4, 8)


def train(mesh: Mesh) -> tuple[float, int]:
    """Compare a compiled step with the eager module; return the loss and how many graphs came from the cache."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    serial, module = Small(), Small()
    parallel = parallelize(module, (X,), Plan(mesh, compile=True))
    assert mesh.size == 1 or isinstance(parallel.placements("up.weight")[0], Shard)
    loss, expected = parallel(X), serial(X)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 1e9)
    torch.testing.assert_close(parallel.clip_grad_norm_(1e9), norm)
    return loss.item(), torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


def test_in_one_process_and_again_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first, hits = train(Mesh())
    assert hits == 0
    second, hits = train(Mesh())
    assert hits == 2, "the forward and the backward graph"
    assert second == first


@ranks(2)
def test_on_two_ranks(world: World) -> None:
    """In one job: what compiling itself needs is loaded once."""
    for mesh in ("fsdp=2", "tp=2"):
        train(Mesh.parse(mesh))
