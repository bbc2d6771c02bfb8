from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError, PlanError
from paceline.plan import Mesh, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import PlacedModule, parallelize
from tests.ranks import ranks
from tests.runtime.steps import BATCH, WIDTH, Stack, batch, layout


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlacedModule]:
    """A start that filled a cache, and where that is."""
    folder = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(folder))
        return folder, start()


@pytest.fixture
def first(cache: Path, before: tuple[Path, PlacedModule], monkeypatch: pytest.MonkeyPatch) -> PlacedModule:
    """What a test starts after; its cache is filled."""
    monkeypatch.setenv("PACELINE_CACHE", str(before[0]))
    return before[1]


def start(module: nn.Module | None = None, example: Any = None, mesh: str = "dp=2", **options: Any) -> PlacedModule:
    plan = Plan(Mesh.parse(mesh)).with_(**options)
    return parallelize(module or Stack(), example or batch(), plan, devices=["cpu"])


def was_captured(parallel: PlacedModule) -> bool:
    return parallel.startups[-1].capture_s > 0


def test_a_second_start_needs_no_capture_and_runs_the_same(first: PlacedModule) -> None:
    second = start()
    assert was_captured(first) and not was_captured(second)
    assert list(layout(first.step(*batch()))) == list(layout(second.step(*batch())))
    losses = [parallel(*batch()) for parallel in (first, second)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


OTHERS: dict[str, dict[str, Any]] = {
    "axis": {"mesh": "fsdp=2"},
    "ranks": {"mesh": "dp=3"},
    "zero stage": {"zero_stage": 2},
    "buckets": {"bucket_bytes": 7},
    "module": {"module": Stack(blocks=3)},
    "dtype": {"module": Stack(dtype=torch.float32), "example": batch(torch.float32)},
    "frozen": {"module": Stack()},
    "shape": {"example": (torch.zeros(2 * BATCH, WIDTH, dtype=torch.float64),)},
}
OTHERS["frozen"]["module"].blocks[0].requires_grad_(False)


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.usefixtures("first")
def test_what_makes_another_program_is_captured(what: str) -> None:
    assert was_captured(start(**OTHERS[what]))


@pytest.mark.usefixtures("first")
def test_other_weights_are_the_same_program() -> None:
    module = Stack()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    parallel = start(module)
    assert not was_captured(parallel)
    torch.testing.assert_close(parallel(*batch()), module(*batch()))


def test_off_means_off(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "off")
    assert was_captured(start()) and was_captured(start())
    assert not cache.exists()


def test_training_and_evaluation_and_each_shape_are_steps_of_their_own() -> None:
    parallel = start()
    (x,) = batch()
    parallel(x)
    assert len(parallel.startups) == 1, "planned by parallelize"
    parallel(x[:4])
    parallel.eval()
    parallel(x)
    parallel(x[:4])
    parallel.train()
    parallel.whole(x[:3])
    assert len(parallel.startups) == 5
    for example in (x, x[:4]):
        parallel(example)
    assert len(parallel.startups) == 5


class Mapped(nn.Module):
    """Uses an operator for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(self.linear(x).view(-1, 2, 2) / 10).mean()


def test_operators_without_a_rule_are_computed_whole_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Mapped(), torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    with caplog.at_level(logging.WARNING, "paceline"):
        parallel = start(module, (x,))
    unknown = parallel.step(x).unknown_operators
    assert any("matrix_exp" in name for name in unknown)
    assert "no rule for" in caplog.text and "matrix_exp" in caplog.text
    loss, expected = parallel(x), module(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad, module.get_parameter(name.partition(".")[2]).grad)


def test_values_that_are_no_tensors_make_another_step() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
            return F.mse_loss(self.linear(x) * scale, x if mask is None else x * mask)

    module, x = Scaled(), torch.randn(6, 4)
    parallel = start(module, (x, 1.0))
    for example in ((x, 1.0), (x, 2.0), (x, 1.0, None), (x, 1.0, torch.ones(6, 4))):
        torch.testing.assert_close(parallel(*example), module(*example))
    assert len(parallel.startups) == 4


@ranks(mesh="dp=2")
def test_every_rank_hears_why_rank_0_cannot_plan(mesh: Mesh, world: World) -> None:
    with pytest.raises(PacelineError, match="a batch of 5 does not divide over 2 ranks"):
        parallelize(Stack(), (torch.zeros(5, WIDTH, dtype=torch.float64),), Plan(mesh))
    parallel = parallelize(Stack(), batch(), Plan(mesh))  # and the job goes on
    with pytest.raises(PlanError, match="does not divide"):
        parallel(torch.zeros(3, WIDTH, dtype=torch.float64))
    parallel(*batch()).backward()


@ranks(mesh="dp=2,fsdp=2")
def test_all_ranks_run_the_plan_of_rank_0(mesh: Mesh, world: World) -> None:
    """Each process has a hash seed of its own; a step planned twice would be a deadlock waiting to happen."""
    parallel = parallelize(Stack(), batch(), Plan(mesh))
    mine = "\n".join(layout(parallel.step(*batch())))
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine)
    assert len(set(everyone)) == 1
    assert (parallel.startups[0].capture_s > 0) == (world.rank == 0)


@ranks(2)
def test_a_mesh_of_another_size_is_refused(world: World) -> None:
    with pytest.raises(PlanError, match="mesh dp=4 has 4 ranks, but this job has 2"):
        parallelize(Stack(), batch(), Plan(Mesh.parse("dp=4")))
    assert parallelize(Stack(), batch()).mesh == Mesh.parse("dp=2")
