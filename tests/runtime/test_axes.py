"""The parallel module on axes that split no samples: every kind of call, and steps of several shapes and modes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PlacementError
from paceline.placement.placements import REPLICATE, Shard
from paceline.plan import Mesh, Plan
from paceline.program.program import Input, InputRole
from paceline.runtime.job.world import World
from paceline.runtime.module import PlacedModule, parallelize
from tests.ranks import ranks

B, T, VOCABULARY, WIDTH = 4, 16, 1024, 8  # so that steps of other shapes are best placed otherwise
MESHES = ["sp=2,dp=2", "tp=2,fsdp=2"]
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Parameters of one shape that want to be split along different dimensions, dropout, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.drop(self.down(torch.tanh(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.leave = nn.Conv2d(6, 5, 3, padding=1, stride=2)
        self.double()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.leave(torch.tanh(self.norm(self.enter(images))))
        return F.cross_entropy(x.mean((2, 3)), labels)


def images(size: int = B, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(5, (size,), generator=generator)


def batch(size: int = B, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (size, T), generator=generator)
    return tokens, torch.where(tokens > 250, tokens.roll(-1, 1), -100)


def assert_equal(parallel: PlacedModule, serial: nn.Module, tolerance: float = 1e-9) -> None:
    """Compare every piece of every parameter, gradient and buffer here."""
    expected = {**dict(serial.named_parameters()), **dict(serial.named_buffers())}
    for shard in parallel.shards():
        pairs = [(shard.tensor.detach(), expected[shard.name].detach())]
        if shard.tensor.grad is not None:
            gradient = expected[shard.name].grad
            assert gradient is not None
            pairs.append((shard.tensor.grad, gradient))
        for patch in shard.patches:
            for mine, whole in pairs:
                torch.testing.assert_close(
                    mine[patch.local.index], whole[patch.whole.index], rtol=tolerance, atol=tolerance, msg=shard.name
                )


def assert_step(parallel: PlacedModule, serial: nn.Module, given: Batch, seed: int, call: str = "forward") -> None:
    parallel.seed(seed)
    torch.manual_seed(seed)
    loss, expected = getattr(parallel, call)(*given), serial(*given)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert parallel.last_weight == (given[1] >= 0).sum()
    loss.backward()
    expected.backward()
    assert_equal(parallel, serial)


@pytest.mark.parametrize(
    ("mesh", "make", "batch"), [*((mesh, Net, batch) for mesh in MESHES), ("hw=2,dp=2", Images, images)]
)
def test_every_step_finds_parameters_where_ranks_hold_them(
    mesh: str, make: Callable[[], nn.Module], batch: Callable[..., Batch]
) -> None:
    """The solver may like other placements for another shape, or for evaluation, where nothing comes back."""
    serial = make()
    parallel = parallelize(copy.deepcopy(serial), batch(), Plan(Mesh.parse(mesh)), devices=["cpu"])
    held = {item.name: along for item, along in parallel._planner._held.items()}
    assert held == {shard.name: parallel.placements(shard.name) for shard in parallel.shards()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (serial, parallel)]
    for seed, (size, call) in enumerate([(B, "forward"), (2 * B, "forward"), (3, "whole")]):
        assert_step(parallel, serial, batch(size, seed), seed, call)
        norms = parallel.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(serial.parameters(), 0.5)
        torch.testing.assert_close(norms[0].double(), norms[1], rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(parallel, serial, 1e-8)
    serial.eval()
    parallel.eval()
    for size, call in ((B, "forward"), (1, "whole")):
        loss, expected = getattr(parallel, call)(*batch(size)), serial(*batch(size))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-8, atol=1e-8)


def test_a_step_that_wants_them_elsewhere_is_refused() -> None:
    parallel = parallelize(Net(), batch(), Plan(Mesh.parse("tp=2")), devices=["cpu"])
    other = Shard(1) if parallel.placements("up.weight") == (Shard(0),) else Shard(0)
    parallel._planner._held[Input(InputRole.PARAMETER, "up.weight")] = (other,)
    with pytest.raises(PlacementError, match=r"wants 'up.weight' placed as S\d, but ranks hold it as S\d"):
        parallel(*batch(2 * B))


@ranks(mesh="sp=2,dp=2")
def test_ranks_of_one_part_are_given_the_same_samples(mesh: Mesh, world: World) -> None:
    serial = Net()
    parallel = parallelize(copy.deepcopy(serial), batch(), Plan(mesh))
    assert parallel.input_shard == (world.rank % 2, 2)
    for seed, call in enumerate(["forward", "local"]):
        given = batch(seed=seed)
        parallel.seed(seed)
        torch.manual_seed(seed)
        mine = given if call == "forward" else tuple(x.chunk(2)[world.rank % 2] for x in given)
        loss, expected = getattr(parallel, call)(*mine), serial(*given)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        assert_equal(parallel, serial)
    assert_step(parallel, serial, batch(3), 2, "whole")


@ranks(mesh="tp=2")
def test_processes_hold_pieces_of_the_first_ranks_parameters(mesh: Mesh, world: World) -> None:
    serial, module = Net(), Net()
    if world.rank:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    parallel = parallelize(module, batch(), Plan(mesh))
    assert_equal(parallel, serial, 0.0)
    assert any(parallel.placements(name) != (REPLICATE,) for name, _ in serial.named_parameters())
    assert all(torch.equal(x, serial.state_dict()[name]) for name, x in parallel.full_state_dict().items())
    assert_step(parallel, serial, batch(), 4)
    assert_step(parallel, serial, batch(), 5, "local")
