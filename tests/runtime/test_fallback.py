"""Modules that cannot be captured: refused on every rank, or wrapped by DDP and FSDP2 where that was asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import CaptureError, CheckpointError, PlanError
from paceline.plan import Mesh, Plan
from paceline.runtime.fallback import FallbackModule
from paceline.runtime.interface import ParallelModule
from paceline.runtime.module import PlacedModule, parallelize
from paceline.train.checkpoint import Checkpointer
from tests.ranks import ranks

SAMPLES, WIDTH = 12, 5


class Block(nn.Module):
    """Two experts; one that no sample asks for is not called, and its parameters go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = wanted == number
            if mine.any():  # the user's line
                out[mine] = torch.tanh(expert(x[mine]))
        return x + out


class Output:
    """Not a tensor, nor anything that DDP or FSDP2 would look into."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Net(nn.Module):
    """Tied weights, parameters that do not divide, buffers that are assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave.weight = self.enter.weight
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("first", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        self.calls = self.calls + 1
        self.first = x[0].detach()
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden, (x[:, 0] > 0).long())
        return Output(((self.last(self.leave(hidden)).squeeze(-1) - y) ** 2).mean())


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """The first half wants one expert and the second half the other; in batch 1 nobody wants the second."""
    x = torch.randn(SAMPLES, WIDTH + 1, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(SAMPLES) < SAMPLES // 2, -1, 1 if number != 1 else -1)
    return x[:, :-1].contiguous(), x[:, -1].contiguous()


def part(module: ParallelModule, number: int) -> tuple[Tensor, Tensor]:
    index, count = module.input_shard
    x, y = batch(number)
    return x.chunk(count)[index], y.chunk(count)[index]


def wrapped(mesh: str, fallback: str, *, zero_stage: int = 3, seed: int = 3) -> ParallelModule:
    module = parallelize(net(seed), batch(0), Plan(Mesh.parse(mesh), zero_stage=zero_stage), fallback=fallback)
    assert isinstance(module, FallbackModule)
    return module


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], skip: tuple[str, ...] = ("calls",)) -> None:
    assert list(found) == list(expected)
    for name in set(expected) - set(skip):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12, msg=name)


def trains_as_serial(mesh: str, fallback: str, zero_stage: int, rank: int) -> None:
    serial, module = net(), wrapped(mesh, fallback, zero_stage=zero_stage, seed=3 + rank)  # weights are rank 0's
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in serial.named_parameters()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (serial, module)]
    for number in range(3):
        with torch.no_grad():  # validation in between leaves nothing behind
            assert module(*batch(7)).item() == pytest.approx(serial(*batch(7)).loss.item(), rel=1e-12)
        # Two micro-batches: one that every rank cuts or loads its part of, and one that is too small to divide.
        serial_loss = serial(*batch(number)).loss
        loss = module(*batch(number)) if number == 0 else module.local(*part(module, number))
        assert module.last_weight == SAMPLES
        assert loss.item() == pytest.approx(serial_loss.item(), rel=1e-12)
        rest = [tensor[:1] for tensor in batch(9)]
        (serial_loss + 3 * serial(*rest).loss).backward()
        loss.backward()
        (3 * module.whole(*rest)).backward()
        assert module.last_weight == 1

        squares = [p.grad.square().sum() for p in serial.parameters() if p.grad is not None]
        expected = torch.stack(squares).sum().sqrt().item()
        assert module.clip_grad_norm_(0.1).item() == pytest.approx(expected, rel=1e-6)
        nn.utils.clip_grad_norm_(serial.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(module.full_state_dict(), serial.state_dict())

    state = {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in serial.state_dict().items()}
    state["leave.weight"] = state["enter.weight"]
    for tensor in state.values():
        dist.broadcast(tensor, src=0)
    module.load_full_state_dict(state)
    serial.load_state_dict(state)
    assert_close(module.full_state_dict(), state)
    assert module.eval()(*batch(0)).item() == pytest.approx(serial(*batch(0)).loss.item(), rel=1e-12)
    with pytest.raises(CheckpointError, match=r"missing: last\.bias"):
        module.load_full_state_dict({name: tensor for name, tensor in state.items() if name != "last.bias"})
    with pytest.raises(PlanError, match=f"a batch of 11 samples cannot be split over {module.mesh.size} ranks"):
        module(*(tensor[:11] for tensor in batch(0)))


@pytest.mark.parametrize(
    ("mesh", "fallback", "zero_stage"),
    [("dp=2", "ddp", 3), ("fsdp=2", "fsdp2", 2), ("fsdp=3", "fsdp2", 3), ("fsdp=2,dp=2", "fsdp2", 3)],
)
def test_it_trains_as_the_serial_module_where_samples_weigh_the_same(mesh: str, fallback: str, zero_stage: int):
    ranks(Mesh.parse(mesh).size)(trains_as_serial)(mesh=mesh, fallback=fallback, zero_stage=zero_stage)


def steps(module: ParallelModule, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = module.local(*part(module, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saves_and_goes_on(mesh: str, fallback: str, others: list[str], directory: Path) -> None:
    module = wrapped(mesh, fallback)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    checkpoints = Checkpointer(directory / mesh, module, optimizer)
    steps(module, optimizer, range(2, 4))
    checkpoints.save(2, {}, block=True)
    saved = module.full_state_dict()
    losses, after = steps(module, optimizer, range(4, 6)), module.full_state_dict()

    again = wrapped(mesh, fallback, seed=5)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.05)
    Checkpointer(directory / mesh, again, optimizer).restore()
    assert_close(again.full_state_dict(), saved, skip=())
    assert steps(again, optimizer, range(4, 6)) == losses
    for name, tensor in again.full_state_dict().items():
        assert torch.equal(tensor, after[name]), name
    for other in others:
        Checkpointer(directory / other, again, optimizer).restore()
        assert_close(again.full_state_dict(), saved)
        assert steps(again, optimizer, range(4, 6)) == pytest.approx(losses, rel=1e-6)


def test_checkpoints_are_resumed_bit_for_bit_and_on_other_meshes(tmp_path: Path):
    done: list[str] = []
    for mesh, fallback in (("dp=2", "ddp"), ("fsdp=3", "fsdp2")):
        ranks(Mesh.parse(mesh).size)(saves_and_goes_on)(mesh=mesh, fallback=fallback, others=done, directory=tmp_path)
        done.append(mesh)


@ranks(mesh="dp=2")
def test_without_a_fallback_every_rank_raises_and_shows_the_users_line(mesh: Mesh, rank: int):
    with pytest.raises(CaptureError) as caught:
        parallelize(net(), batch(0), Plan(mesh))
    assert "if mine.any():  # the user's line" in str(caught.value)
    assert "fallback='ddp'" in str(caught.value)


@ranks(mesh="dp=2")
def test_buffers_are_those_of_rank_0(mesh: Mesh, rank: int):
    module = wrapped(str(mesh), "ddp")
    module(*batch(0)).backward()
    assert torch.equal(module.get_buffer("first"), batch(0)[0][rank * SAMPLES // 2])
    assert torch.equal(module.full_state_dict()["first"], batch(0)[0][0])
    assert int(module.get_buffer("calls")) == 1


def test_the_warning_gives_the_reason_and_one_rank_is_the_plain_module(caplog: pytest.LogCaptureFixture):
    serial = net()
    with caplog.at_level(logging.WARNING):
        module = wrapped("serial", "fsdp2")
    assert "fallback='fsdp2'" in caplog.text
    assert "if mine.any():  # the user's line" in caplog.text
    assert module.startups == []
    loss, expected = module(*batch(0)), serial(*batch(0)).loss
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in serial.named_parameters():
        assert torch.equal(module.get_parameter(name).grad, parameter.grad), name


def test_a_module_that_can_be_captured_is(caplog: pytest.LogCaptureFixture):
    module = parallelize(Mean(), (torch.ones(4, 2),), Plan(), fallback="ddp")
    assert isinstance(module, PlacedModule)
    assert "fallback" not in caplog.text


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean()


@pytest.mark.parametrize(
    ("mesh", "fallback", "devices", "message"),
    [
        ("dp=2", "dpp", None, "there is no fallback 'dpp'; known: ddp, fsdp2. Did you mean 'ddp'"),
        ("fsdp=2", "ddp", None, "Use the mesh 'dp=2', or fallback 'fsdp2'"),
        ("dp=2,fsdp=2", "ddp", None, "Use the mesh 'dp=4', or fallback 'fsdp2'"),
        ("dp=2", "fsdp2", None, "Use the mesh 'fsdp=2', or fallback 'ddp'"),
        ("dp=2,tp=2", "ddp", None, r"has the axis 'tp'\. Use the mesh 'dp=4'"),
        ("sp=2", "fsdp2", None, r"has the axis 'sp'\. Use the mesh 'fsdp=2'"),
        ("dp=2", "ddp", ["cpu"], "needs a process per rank"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_tried(mesh, fallback, devices, message):
    with pytest.raises(PlanError, match=message):
        parallelize(Mean(), (torch.ones(4, 2),), Plan(Mesh.parse(mesh)), devices=devices, fallback=fallback)
