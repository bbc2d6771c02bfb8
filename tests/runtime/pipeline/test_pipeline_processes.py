"""Stages in processes of their own, alone and with every other axis, and the messages between them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.module import parallelize
from paceline.runtime.pipeline.channels import Message, ProcessChannel
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.step import Sent
from paceline.runtime.pipeline.wire import wire_named
from paceline.schedule import Payload
from tests.ranks import ranks
from tests.runtime.pipeline.towers import accumulated, batch, tower


def trains_as_serially(mesh: Mesh, schedule: str) -> None:
    """Gradients, their norm, parameters after a step, evaluation: as the module itself, on every rank."""
    module, given = tower(layers=2, dropout=0.5, tied=True), batch(6, time=(4,))
    plan = Plan(mesh, pipeline=PipelinePlan(schedule, 2))
    found = parallelize(copy.deepcopy(module), given, plan)
    assert isinstance(found, PipelinedModule)
    found.seed(3)
    loss = found(*given)
    loss.backward()
    expected, serial = accumulated(module, given, 2, 3, mesh.batch_parts)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    gradients = {name: p.grad for name, p in serial.named_parameters()}
    for shard in found.shards():
        whole = gradients[shard.name]
        assert shard.tensor.grad is not None and whole is not None
        for patch in shard.patches:
            ours, theirs = shard.tensor.grad[patch.local.index], whole[patch.whole.index]
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=shard.name)
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.01)
    assert float(found.clip_grad_norm_(0.01)) == pytest.approx(float(norm), rel=1e-6)
    for trained in (found, serial):
        torch.optim.SGD(trained.parameters(), lr=100.0).step()
    state = found.full_state_dict()
    for name, tensor in serial.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9, msg=name)
    found.eval()
    assert found(*given).item() == pytest.approx(serial.eval()(*given).item(), rel=1e-9)


@ranks(mesh="dp=2,pp=2", backend="gloo")
def test_with_dp_over_gloo(mesh: Mesh) -> None:
    trains_as_serially(mesh, "1f1b")


@ranks(mesh="fsdp=2,pp=2")
def test_with_fsdp(mesh: Mesh) -> None:
    trains_as_serially(mesh, "zb-h1")


@ranks(mesh="tp=2,pp=2")
def test_with_tp(mesh: Mesh) -> None:
    trains_as_serially(mesh, "1f1b")


@ranks(mesh="pp=2,sp=2")
def test_with_sp(mesh: Mesh) -> None:
    trains_as_serially(mesh, "gpipe")


@ranks(mesh="dp=2,tp=2,pp=2")
def test_with_dp_and_tp(mesh: Mesh) -> None:
    trains_as_serially(mesh, "zb-h1")


def messages_arrive(rank: int) -> None:
    """In the order of sending, of several kinds at once, whatever their strides; nobody waits for a receiver."""
    group = dist.group.WORLD
    assert group is not None
    channel = ProcessChannel(group, torch.device("cpu"), wire_named("exact"))
    other = 1 - rank

    def tensors(number: int, sender: int) -> list[Tensor]:
        x = torch.arange(12.0, dtype=torch.float64).view(3, 4) + 100 * number + 1000 * sender
        return [x.t(), torch.empty(0, 5), torch.tensor(number), x > 105, x[::2, 1].bfloat16()]

    kinds = (Payload.ACTIVATION, Payload.GRADIENT)
    for number in range(3):
        for payload in kinds:
            values = [[x] for x in tensors(number, rank)]
            channel.send(Message(payload, rank, other, number), other, values)
    for payload in reversed(kinds):  # another order between kinds than they were sent in
        for number in range(3):
            message = Message(payload, other, rank, number)
            assert not channel.has(message)
            channel.expect(message, other, [Sent(tuple(x.shape), x.dtype) for x in tensors(number, other)])
            assert channel.has(message)
    for payload in kinds:
        for number in range(3):
            received = channel.receive(Message(payload, other, rank, number))
            for (ours,), sent in zip(received, tensors(number, other), strict=True):
                assert ours.dtype == sent.dtype and torch.equal(ours, sent)
    for number in range(3):
        for payload in kinds:
            channel.release(Message(payload, rank, other, number))


@ranks(2, backend="gloo")
def test_messages_over_gloo(rank: int) -> None:
    messages_arrive(rank)


@ranks(2)
def test_messages_over_what_users_get(rank: int) -> None:
    messages_arrive(rank)
