"""The partition that is found for an uneven module runs: two ranks take micro-batches of its slow stage in turns."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import PlanError
from paceline.placement.costs import Costs
from paceline.planner.partition import Level, Partition, partition
from paceline.planner.profile import profile
from paceline.program.capture import capture
from paceline.runtime.pipeline.pieces import micro_batches
from paceline.verify.replay import Replay
from paceline.verify.serial import Piece
from tests.runtime.pipeline.towers import accumulated, assert_same_gradients, pipelined, tower

LENGTH, CHANNELS = 128, 16


class Uneven(nn.Module):
    """A layer of much computation and few parameters, and one of many parameters that computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Conv1d(CHANNELS, CHANNELS, 9, padding=4)
        self.wide = nn.Linear(CHANNELS, 1000)
        self.head = nn.Linear(1000, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.slow(x)).mean(-1)
        return F.cross_entropy(self.head(torch.tanh(self.wide(x))), labels)


def uneven() -> Uneven:
    torch.manual_seed(0)
    return Uneven().double()


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (size,), generator=generator)
    return torch.randn(size, CHANNELS, LENGTH, generator=generator, dtype=torch.float64), labels


def found_for(module: nn.Module, given: Any) -> tuple[Partition, dict[str, Any]]:
    """The partition for 3 ranks with slow links, and what the plan says of it."""
    layers = profile(capture(module, given), Costs.default())
    found = partition(layers, [Level(3, 1e9)])
    return found, {
        "boundaries": tuple(layers[stage.first].name for stage in found.stages[1:]),
        "replicas": tuple(stage.replicas for stage in found.stages),
    }


def test_1f1b_gives_the_serial_gradients() -> None:
    module, given = uneven(), batch(7)
    _, flow = found_for(module, micro_batches(given, 4)[0])
    assert flow["replicas"] == (2, 1), flow
    loss, expected = accumulated(module, given, 4, seed=5)
    found = pipelined(module, given, "pp=3", micro_batches=4, **flow)
    value = found(*given)
    value.backward()
    assert value.item() == pytest.approx(loss, rel=1e-9)
    assert_same_gradients(found, expected)


class Whole(NamedTuple):
    """A micro-batch of asynchronous training."""

    batch: Any
    whole: bool = False
    samples: int = 2


def test_pipedream_is_its_own_replay_bit_by_bit() -> None:
    module = uneven().float()
    pieces = [Whole((x.float(), labels)) for x, labels in micro_batches(batch(16), 8)]
    _, flow = found_for(module, pieces[0].batch)
    assert flow["replicas"] == (2, 1), flow
    found = pipelined(module, pieces[0].batch, "pp=3", schedule="pipedream", micro_batches=1, **flow)
    optimizer = torch.optim.AdamW(found.parameters(), lr=1e-2)
    steps = [pieces[:4], pieces[4:]]
    seeds = [[10, 11, 12, 13], [14, 15, 16, 17]]
    log = found.train_batches(steps, seeds, lambda stage, version: optimizer.step()).log
    program = capture(module, pieces[0].batch)
    stages = found.trained_by_stage
    replay = Replay(lambda piece: program, module, stages, log, lambda given: torch.optim.AdamW(given, lr=1e-2))
    told = replay.run([Piece(it.batch, seed, 1.0) for it, seed in zip(pieces, chain(*seeds), strict=True)])
    state = found.full_state_dict()
    assert told.parameters.keys() == state.keys()
    for name, expected in told.parameters.items():
        assert torch.equal(state[name], expected), name
        assert not torch.equal(module.state_dict()[name], expected), name


class Normed(nn.Module):
    """Batch norm in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.norm(self.enter(x)))), labels)


def labelled() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 6


def test_ranks_that_take_turns_have_no_buffers_that_change() -> None:
    flow = {"boundaries": ("head",), "replicas": (2, 1)}
    with pytest.raises(PlanError, match=r"(?s)stage 0 changes the buffer 'norm\..*Give it one rank"):
        pipelined(Normed().double(), labelled(), "pp=3", **flow)
    pipelined(Normed().double(), labelled(), "pp=3", **{**flow, "replicas": (1, 2)})


def test_ranks_that_take_turns_share_no_parameter_with_another_stage() -> None:
    flow = {"boundaries": ("layers.4",), "replicas": (2, 1)}
    with pytest.raises(
        PlanError, match=r"(?s)'layers\.0\.linear\.weight' is used by the stages \[0, 1\].*stage 0 has 2"
    ):
        pipelined(copy.deepcopy(tower(tied=True)), labelled(), "pp=3", **flow)


def test_a_partition_obeys_what_runtime_refuses() -> None:
    for module in (Normed().double(), tower(tied=True)):
        found, flow = found_for(module, labelled())
        assert sum(stage.replicas for stage in found.stages) == 3
        pipelined(module, labelled(), "pp=3", **flow)


def test_one_stage_may_have_all_ranks() -> None:
    module, given = uneven(), batch(7)
    loss, expected = accumulated(module, given, 4, seed=5)
    found = pipelined(module, given, "pp=3", micro_batches=4, replicas=(3,))
    value = found(*given)
    value.backward()
    assert value.item() == pytest.approx(loss, rel=1e-9)
    assert_same_gradients(found, expected)
