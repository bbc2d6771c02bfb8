"""Groups for each direction and payload, as NCCL needs them; here on Gloo, where they must give the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.module import parallelize
from paceline.runtime.pipeline import channels, ranks
from paceline.runtime.pipeline.channels import ProcessChannel
from tests.ranks import ranks as on_ranks


class Net(nn.Module):
    """Six layers, of which the first and the last share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


@on_ranks(2, backend="gloo")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_with_a_group_for_each_way_gradients_are_the_same(rank: int, schedule: str) -> None:
    torch.manual_seed(0)
    module = Net().double()
    serial, batch = copy.deepcopy(module), (torch.randn(8, 8).double(), torch.randn(8, 8).double())
    asked: list[bool] = []

    def remember(channel: ProcessChannel, *given: object) -> None:
        send(channel, *given)  # type: ignore[arg-type]
        asked.append(channel._directed is not None)

    send = channels.ProcessChannel.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "needs_directions", lambda group: True)
        patch.setattr(channels.ProcessChannel, "send", remember)
        plan = Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan(schedule=schedule, micro_batches=4))
        net = parallelize(module, batch, plan)
        net(*batch).backward()
    assert asked and all(asked)
    serial(*batch).backward()
    expected = dict(serial.named_parameters())
    for shard in net.shards():
        torch.testing.assert_close(shard.tensor.grad, expected[shard.name].grad, rtol=1e-9, atol=1e-12)
