"""Ours without communication: what ranks of a pipeline compute, on messages kept from an earlier step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.bench.workloads import Batch
from paceline.plan import Plan
from paceline.runtime.batches import pieces_of_whole
from paceline.runtime.pipeline.channels import Channel, Message, RankTensors
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.pieces import micro_batches
from paceline.runtime.pipeline.reduce import averaged
from paceline.runtime.pipeline.scheduling import Schedules, edges_of
from paceline.runtime.pipeline.shares import Shares
from paceline.runtime.pipeline.step import Sent
from paceline.runtime.pipeline.walk import MicroBatch, Observe, Walk


class Kept:
    """A channel that keeps what came through another one; once `cut_off`, it gives the same again and sends nothing."""

    def __init__(self, channel: Channel) -> None:
        self._channel: Channel | None = channel
        self._came: dict[Message, RankTensors] = {}

    def cut_off(self) -> None:
        """From now on there is no other rank."""
        self._channel = None

    def send(self, message: Message, rank: int, values: RankTensors) -> None:
        """Send, or drop."""
        if self._channel is not None:
            self._channel.send(message, rank, values)

    def expect(self, message: Message, rank: int, sent: Sequence[Sent]) -> None:
        """Make room, or nothing."""
        if self._channel is not None:
            self._channel.expect(message, rank, sent)

    def has(self, message: Message) -> bool:
        """Whether `receive` may be called."""
        return self._channel is None or self._channel.has(message)

    def receive(self, message: Message) -> RankTensors:
        """Return what comes, or what came."""
        if self._channel is None:
            return self._came[message]
        values = self._channel.receive(message)
        self._came[message] = [[piece.clone() for piece in pieces] for pieces in values]
        return values

    def release(self, message: Message) -> None:
        """Let go of what was sent."""
        if self._channel is not None:
            self._channel.release(message)


class Control:
    """The part of a step that one rank computes.

    Args:
        module: of one rank per process; a step of it is taken, to keep its messages, and it is of no use afterwards.
        batch: which every rank is given whole.
        plan: of the module.
    """

    def __init__(self, module: PipelinedModule, batch: Batch, plan: Plan) -> None:
        (self._rank,) = module.here
        kept = Kept(self._rank.channel)
        self._rank.channel = kept
        module(**batch)
        kept.cut_off()
        self.parameters = list(module.parameters())
        self.observe: Observe | None = None
        steps = module.steps(**batch)
        pieces = micro_batches(batch, len(steps))
        self._schedule = Schedules(plan.pipeline, plan.mesh.stage_ranks).training(
            len(steps), edges_of(steps[0].pipeline)
        )
        where = self._rank.state.where(self._rank.executor.ranks[0])
        self._given = [
            MicroBatch(step, [pieces_of_whole(step, piece, where)], seed=0)
            for step, piece in zip(steps, pieces, strict=True)
        ]
        self._shares = Shares(steps, equal=False)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Compute forward and backward passes, and leave gradients; they mean nothing after the first update."""
        walk = Walk(self._rank, self._schedule, self._given, self._shares, observe=self.observe)
        while not walk.is_over:
            walk.go_on()
        walk.finish()
        for stage in self._rank.stages:
            found = averaged(self._rank, self._given[0].step, stage, walk.sums[stage])
            for name, (gradient,) in found.items():
                parameter = self._rank.state.pieces[0][name]
                assert isinstance(parameter, nn.Parameter)
                parameter.grad = gradient
        return torch.zeros(())
