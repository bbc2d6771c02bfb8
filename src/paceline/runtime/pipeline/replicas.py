"""Stages that several pipeline ranks compute in turns: their gradients are added up before each update.

Each rank gives its sums to the others and adds theirs to its own in the order of ranks, so that copies of the
parameters stay equal bit by bit.
"""

from __future__ import annotations

from collections import Counter

import torch

from paceline.errors import PlanError
from paceline.program.program import OutputRole
from paceline.runtime.pipeline.channels import Message
from paceline.runtime.pipeline.stage_rank import Pieces, StageRank
from paceline.runtime.pipeline.step import PipelineStep, Sent
from paceline.runtime.pipeline.sums import Sums
from paceline.schedule import Payload, Schedule
from paceline.schedule.places import Replicas as Places


def check_replicas(step: PipelineStep, replicas: Places) -> None:
    """Refuse stages of several ranks for which it is not defined what these have in common.

    Raises:
        PlanError: such a stage changes a buffer, or trains a parameter that another stage uses too.
    """
    users: dict[str, list[int]] = {}
    for stage in step.pipeline.stages:
        for name in dict.fromkeys((*step.parameters_of(stage.index), *stage.gradients)):
            users.setdefault(name, []).append(stage.index)
    for stage, ranks in zip(step.pipeline.stages, replicas, strict=True):
        if len(ranks) == 1:
            continue
        changed = [output.name for output in stage.outputs if output.role is OutputRole.BUFFER]
        if changed:
            raise PlanError(
                f"stage {stage.index} changes the buffer '{changed[0]}' with each micro-batch, as batch norm does, "
                f"and its {len(ranks)} ranks take micro-batches in turns: their buffers would part. Give it one "
                "rank (plan.pipeline.replicas), choose boundaries that move the module to such a stage, or split the "
                "batch by the axis dp."
            )
        tied = [name for name in stage.gradients if len(users[name]) > 1]
        if tied:
            raise PlanError(
                f"the parameter '{tied[0]}' is used by the stages {users[tied[0]]}, and stage {stage.index} has "
                f"{len(ranks)} ranks. Parameters may be shared by stages of one rank each: untie it, choose boundaries "
                "that keep its users on one stage, or give these stages one rank (plan.pipeline.replicas)."
            )


class Replicas:
    """The other ranks of the stages of one rank, during one walk."""

    def __init__(self, rank: StageRank, schedule: Schedule) -> None:
        self._rank = rank
        self._schedule = schedule
        self._given: Counter[int] = Counter()

    def give(self, stage: int, step: PipelineStep, sums: Sums) -> None:
        """Send this rank's sums to the others, and expect theirs."""
        others = self._others(stage)
        self._given[stage] += 1
        for other in others:
            values = [self._own(sums, name) for name in step.pipeline.stages[stage].gradients]
            weight = [torch.tensor(sums.weight, dtype=torch.float64, device=device) for device in self._rank.devices]
            self._rank.channel.send(self._message(stage, self._rank.number, other), other, [*values, weight])
        for other in others:
            layout = [_layout(self._rank, name) for name in step.pipeline.stages[stage].gradients]
            message = self._message(stage, other, self._rank.number)
            self._rank.channel.expect(message, other, [*layout, Sent((), torch.float64)])

    def are_there(self, stage: int) -> bool:
        """Whether the sums of all others may be taken without waiting for a rank of this process."""
        return all(
            self._rank.channel.has(self._message(stage, other, self._rank.number)) for other in self._others(stage)
        )

    def added_up(self, stage: int, step: PipelineStep, sums: Sums) -> Sums:
        """Return the sums over all ranks of a stage; `read` stays that of this rank."""
        others = self._others(stage)
        if not others:
            return sums
        names = list(step.pipeline.stages[stage].gradients)
        terms = {self._rank.number: (sums.weight, {name: self._own(sums, name) for name in names})}
        for other in others:
            *values, weight = self._rank.channel.receive(self._message(stage, other, self._rank.number))
            terms[other] = float(weight[0]), dict(zip(names, values, strict=True))
        for other in others:
            self._rank.channel.release(self._message(stage, self._rank.number, other))
        (weight_sum, gradients), *rest = (terms[number] for number in sorted(terms))
        gradients = {name: [piece.clone() for piece in pieces] for name, pieces in gradients.items()}
        for term, found in rest:
            weight_sum += term
            for name, pieces in found.items():
                torch._foreach_add_(gradients[name], pieces)
        return Sums(gradients, weight_sum, sums.read)

    def _others(self, stage: int) -> list[int]:
        return [rank for rank in self._schedule.replicas[stage] if rank != self._rank.number]

    def _own(self, sums: Sums, name: str) -> Pieces:
        if name in sums.gradients:
            return sums.gradients[name]
        return [torch.zeros_like(pieces[name]) for pieces in self._rank.state.pieces]

    def _message(self, stage: int, source: int, target: int) -> Message:
        return Message(Payload.GRADIENT, source, target, -self._given[stage])


def _layout(rank: StageRank, name: str) -> Sent:
    held = rank.state.pieces[0][name]
    return Sent(tuple(held.shape), held.dtype)
