"""The parallel module in a user's own loop: everything that a serial module does, on every mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import CheckpointError, PlanError
from paceline.plan import Mesh, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import PlacedModule, parallelize
from tests.ranks import ranks
from tests.runtime.nets import Net, assert_gradients, batch, pair, step, user_name

MESHES = ["serial", "dp=2", "fsdp=2", "fsdp=3", "dp=2,fsdp=2", "fsdp=2,dp=3"]


@pytest.mark.parametrize("mesh", MESHES)
def test_training_is_serial_training(mesh: str) -> None:
    serial, parallel = pair(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (serial, parallel)]
    for number in range(3):
        losses, norms = [], []
        for module, optimizer in zip((serial, parallel), optimizers, strict=True):
            losses.append(step(module, batch(seed=number), seed=number))
            norms.append(
                module.clip_grad_norm_(0.5)
                if isinstance(module, PlacedModule)
                else nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            )
            if number == 0:
                continue  # gradients of two batches add up, and are clipped together
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(norms[1].double(), norms[0], rtol=1e-6, atol=1e-6)
    expected = serial.state_dict()
    found = parallel.full_state_dict()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "dp=2,fsdp=2"])
def test_micro_batches_with_unequal_tokens_make_the_full_gradient(mesh: str) -> None:
    class WithoutMemory(Net):
        """Batch norm and dropout see one micro-batch at a time, in a serial loop too: without them."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.Identity(), nn.Identity()

    serial, parallel = pair(mesh, WithoutMemory)
    tokens, labels = batch()
    step(serial, (tokens, labels), 0)
    total = 0.0
    for part in (slice(0, 4), slice(4, 12)):
        loss = parallel(tokens[part], labels[part])
        assert parallel.last_weight == (labels[part] >= 0).sum()
        (loss * parallel.last_weight).backward()
        total += parallel.last_weight
    for parameter in parallel.parameters():
        if parameter.grad is not None:
            parameter.grad /= total
    assert_gradients(serial, parallel)


@pytest.mark.parametrize("mesh", ["serial", "dp=2", "fsdp=3", "dp=2,fsdp=2"])
def test_names_are_the_users(mesh: str) -> None:
    serial, parallel = pair(mesh)
    mine = [name for name, _ in serial.named_parameters()]
    count = parallel.mesh.size
    assert [user_name(name) for name, _ in parallel.named_parameters()] == mine * count
    assert {user_name(name) for name in parallel.state_dict()} - {"passing"} == set(serial.state_dict())
    assert list(parallel.full_state_dict()) == list(serial.state_dict())
    assert parallel.state_names["head.weight"] == "embed.weight"
    frozen = {user_name(name): p.requires_grad for name, p in parallel.named_parameters()}
    assert frozen == {name: p.requires_grad for name, p in serial.named_parameters()}


@pytest.mark.parametrize("mesh", MESHES)
def test_whole_states_go_in_and_out(mesh: str) -> None:
    _, parallel = pair(mesh)
    other = Net()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.copy_(torch.randn_like(tensor) if tensor.is_floating_point() else torch.full_like(tensor, 7))
    parallel.load_full_state_dict(other.state_dict())
    found = parallel.full_state_dict()
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in found.items())
    for tensor in found.values():
        tensor.zero_()  # copies: what is done to them does not reach the module
    assert all(torch.equal(t, other.state_dict()[n]) for n, t in parallel.full_state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("up.weight"), "missing: up.weight"),
        (lambda state: state.update({"up.wieght": torch.zeros(1)}), "unexpected: up.wieght. Did you mean 'up.weight'"),
        (lambda state: state.update({"up.weight": torch.zeros(7, 5)}), r"up.weight has shape \(7, 5\), the module has"),
    ],
)
def test_a_foreign_state_changes_nothing(change: Any, message: str) -> None:
    _, parallel = pair("fsdp=3")
    before = parallel.full_state_dict()
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    change(state)
    with pytest.raises(CheckpointError, match=message):
        parallel.load_full_state_dict(state)
    assert all(torch.equal(t, before[n]) for n, t in parallel.full_state_dict().items())


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=3"])
def test_shards_cover_every_tensor_once(mesh: str) -> None:
    serial, parallel = pair(mesh)
    tensors = {**dict(serial.named_parameters()), **dict(serial.named_buffers())}
    covered = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    for shard in parallel.shards():
        assert shard.shape == tensors[shard.name].shape
        assert shard.is_parameter == isinstance(tensors[shard.name], nn.Parameter)
        for patch in shard.patches:
            assert torch.equal(shard.tensor[patch.local.index], tensors[shard.name][patch.whole.index])
            covered[shard.name][patch.whole.index] += shard.owner
    assert all(bool((count == 1).all()) for count in covered.values())


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_evaluation_and_no_grad(mesh: str) -> None:
    serial, parallel = pair(mesh)
    tokens, labels = batch()
    before = parallel.full_state_dict()
    serial.eval()
    parallel.eval()
    loss = parallel(tokens, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, serial(tokens, labels).detach())
    assert parallel.last_weight == (labels >= 0).sum()
    assert all(torch.equal(t, before[n]) for n, t in parallel.full_state_dict().items()), "no statistics in evaluation"
    serial.train()
    parallel.train()
    with torch.no_grad():
        parallel.seed(3)
        torch.manual_seed(3)
        loss = parallel(tokens, labels)
        torch.testing.assert_close(loss, serial(tokens, labels))
    assert not loss.requires_grad
    assert parallel.full_state_dict()["norm.num_batches_tracked"] == 1


def test_backward_runs_once() -> None:
    _, parallel = pair("dp=2")
    loss = parallel(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the module again"):
        loss.backward()


def test_what_backward_needs_is_freed_by_it() -> None:
    _, parallel = pair("dp=2")
    loss = parallel(*batch())
    saved = loss.grad_fn.saved  # type: ignore[union-attr]
    assert all(saved)
    loss.backward()
    assert saved == [[], []]


def test_the_tangent_scales_every_gradient() -> None:
    serial, parallel = pair("dp=2,fsdp=2")
    torch.manual_seed(1)
    (serial(*batch()) * -3.5).backward()
    parallel.seed(1)
    (parallel(*batch()) * -3.5).backward()
    assert_gradients(serial, parallel)


@pytest.mark.parametrize("size", [1, 5, 7])
def test_a_batch_that_does_not_divide(size: int) -> None:
    serial, parallel = pair("fsdp=2,dp=3")
    given = batch(size, seed=4)
    given[1][:, 0] = 0
    if size % 6:
        with pytest.raises(PlanError, match=f"a batch of {size} does not divide over 6 ranks.*Use a batch of"):
            parallel(*given)
    parallel.seed(2)
    loss = parallel.whole(*given)
    loss.backward()
    torch.testing.assert_close(loss.detach(), step(serial, given, 2))
    assert_gradients(serial, parallel)


def test_a_smaller_last_batch_has_a_program_of_its_own_and_the_first_is_kept() -> None:
    _, parallel = pair("dp=2")
    for size in (12, 6, 12, 6, 12):
        parallel(*batch(size)).backward()
    assert len(parallel.startups) == 2
    parallel.eval()
    for _ in range(2):
        parallel(*batch(6))
    assert len(parallel.startups) == 3


def test_seeds_make_runs_equal() -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        serial = Net()
        torch.manual_seed(seed)
        parallel = parallelize(serial, batch(), Plan(Mesh.parse("dp=2")), devices=["cpu"])
        torch.rand(17)  # what a user draws in between has no say
        return [parallel(*batch()).item() for _ in range(3)]

    first = losses(1)
    assert losses(1) == first
    assert losses(2) != first
    assert len(set(first)) == 3, "each call draws anew"


def test_a_call_leaves_the_users_generator_alone() -> None:
    _, parallel = pair("dp=2")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    parallel(*batch()).backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_zero_grad_and_the_optimizers_own() -> None:
    _, parallel = pair("fsdp=2")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        parallel(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in parallel.parameters())
    states = [s["momentum_buffer"].shape for s in optimizer.state.values()]
    assert states == [p.shape for p in optimizer.state]


def test_clipping_without_gradients_and_below_the_norm() -> None:
    _, parallel = pair("fsdp=2")
    assert parallel.clip_grad_norm_(1.0) == 0.0
    parallel(*batch()).backward()
    before = [None if p.grad is None else p.grad.clone() for p in parallel.parameters()]
    norm = parallel.clip_grad_norm_(1e6)
    assert 0 < norm < 1e6
    for parameter, gradient in zip(parallel.parameters(), before, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_keywords_and_positions_are_not_mixed() -> None:
    _, parallel = pair("dp=2")
    tokens, labels = batch()
    torch.testing.assert_close(
        parallel.eval()(tokens=tokens, labels=labels), parallel(tokens, labels), rtol=0.0, atol=1e-14
    )
    with pytest.raises(PlanError, match="not both"):
        parallel(tokens, labels=labels)


def test_a_batch_key_may_be_named_like_a_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return (x * self.x * scale).square().mean()

    given = {"x": torch.randn(6, 4), "scale": torch.full((4,), 3.0)}
    serial = Model()
    parallel = parallelize(copy.deepcopy(serial), given, Plan(Mesh.parse("dp=2")), devices=["cpu"])
    torch.testing.assert_close(parallel(**given), serial(**given))


def test_a_loss_without_a_weight_says_so() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().sum()

    parallel = parallelize(Summed(), (torch.ones(4, 4),), Plan(Mesh.parse("dp=2")), devices=["cpu"])
    parallel(torch.ones(4, 4)).backward()
    with pytest.raises(PlanError, match="not a mean that Paceline can read off"):
        _ = parallel.last_weight


def test_autocast_of_the_whole_module() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.layers(x).float(), x)

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    serial = Mixed()
    parallel = parallelize(
        copy.deepcopy(serial), (x,), Plan(Mesh.parse("fsdp=2")), devices=["cpu"], autocast=torch.bfloat16
    )
    loss = parallel(x)
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = serial(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    assert abs(loss.item() - F.mse_loss(serial.layers(x), x).item()) > 1e-7, "it was not float32"
    assert all(p.dtype == torch.float32 == p.grad.dtype for p in parallel.parameters())  # type: ignore[union-attr]
    assert_gradients(serial, parallel, tolerance=2e-2)


def test_by_default_there_is_one_rank_or_one_per_device() -> None:
    assert parallelize(Net(), batch()).ranks == (0,)
    assert parallelize(Net(), batch(), devices=["cpu", "cpu"]).mesh == Mesh.parse("dp=2")
    with pytest.raises(PlanError, match="mesh dp=4 has 4 ranks, but this job has 1"):
        parallelize(Net(), batch(), Plan(Mesh.parse("dp=4")))


@pytest.mark.parametrize("place", ["forward", "local"])
@ranks(mesh="dp=2,fsdp=2")
def test_on_real_processes(mesh: Mesh, world: World, place: str) -> None:
    torch.manual_seed(world.rank)  # ranks need not agree on seeds or weights: those of rank 0 count
    serial, module = Net(), Net()
    if world.rank:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    module.up.weight.data = module.up.weight.data.t().contiguous().t()  # not contiguous, as channels-last weights are
    parallel = parallelize(module, batch(), Plan(mesh))
    assert parallel.ranks == (world.rank,) and parallel.input_shard == (world.rank, 4)
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in serial.named_parameters()]
    tokens, labels = batch()
    step(serial, (tokens, labels), 3)
    parallel.seed(3)
    mine = slice(3 * world.rank, 3 * world.rank + 3)
    loss = parallel(tokens, labels) if place == "forward" else parallel.local(tokens[mine], labels[mine])
    assert parallel.last_weight == (labels >= 0).sum()
    loss.backward()
    assert_gradients(serial, parallel)
    torch.testing.assert_close(
        parallel.clip_grad_norm_(0.1).double(), nn.utils.clip_grad_norm_(serial.parameters(), 0.1), rtol=1e-6, atol=0
    )
    assert_gradients(serial, parallel, tolerance=1e-6)
    parallel.load_full_state_dict(serial.state_dict())
    assert all(torch.equal(t, serial.state_dict()[n]) for n, t in parallel.full_state_dict().items())
    with pytest.raises(PlanError, match="does not divide over 4 ranks"):
        parallel(tokens[:5], labels[:5])
