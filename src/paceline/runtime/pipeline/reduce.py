"""From what micro-batches added up to on each stage, to the gradient of every parameter on every rank that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.runtime.pipeline.channels import Message, RankTensors
from paceline.runtime.pipeline.ranks import StageRanks
from paceline.runtime.pipeline.stage_rank import Pieces, StageRank
from paceline.runtime.pipeline.step import PipelineStep, Sent
from paceline.runtime.pipeline.sums import Sums
from paceline.runtime.pipeline.walk import Walk
from paceline.schedule import Payload


def finished_gradients(ranks: StageRanks, walks: Sequence[Walk], step: PipelineStep) -> dict[nn.Parameter, Tensor]:
    """Return the gradient of every parameter in this process; a collective.

    Sums of micro-batches are added up over the ranks of a stage, divided by the weight of all micro-batches, and added
    up over the stages that share a tied parameter: in the order of stages, so that copies stay equal bit by bit.
    """
    found: list[dict[str, Pieces]] = []
    for walk in walks:
        own: dict[str, Pieces] = {}
        for stage in walk.rank.stages:
            sums = walk.sums.pop(stage, Sums())
            for name, pieces in averaged(walk.rank, step, stage, sums).items():
                own[name] = _added(own[name], pieces) if name in own else pieces
        found.append(own)
    _exchange_tied(ranks, [walk.rank for walk in walks], found)
    gradients: dict[nn.Parameter, Tensor] = {}
    for walk, own in zip(walks, found, strict=True):
        for name, pieces in own.items():
            for held, gradient in zip(walk.rank.state.pieces, pieces, strict=True):
                parameter = held[name]
                assert isinstance(parameter, nn.Parameter)
                gradients[parameter] = gradient
    return gradients


def averaged(rank: StageRank, step: PipelineStep, stage: int, sums: Sums) -> dict[str, Pieces]:
    """Return the mean gradient over the micro-batches of a stage, added up over the ranks of the inner mesh."""
    gradients = dict(sums.gradients)
    if sums.weight not in (0.0, 1.0):
        for pieces in gradients.values():
            torch._foreach_div_(pieces, sums.weight)
    reduction = step.reductions[stage]
    if reduction is not None and gradients:
        given = [gradients[name] for name in reduction.parameters]
        gradients.update(zip(reduction.parameters, rank.run_graph(step, reduction.graph, given), strict=True))
    return gradients


def _exchange_tied(ranks: StageRanks, here: Sequence[StageRank], found: Sequence[dict[str, Pieces]]) -> None:
    """Add up the gradients of parameters that lie on several pipeline ranks."""
    tied = ranks.tied_parameters
    for rank, own in zip(here, found, strict=True):
        for number, (name, holders) in enumerate(tied.items()):
            if rank.number in holders:
                for other in holders - {rank.number}:
                    rank.channel.send(_message(rank.number, other, number), other, [_given(rank, own, name)])
    for rank, own in zip(here, found, strict=True):
        for number, (name, holders) in enumerate(tied.items()):
            if rank.number in holders:
                own[name] = _total(rank, _given(rank, own, name), holders, number)
    for rank in here:
        for number, holders in enumerate(tied.values()):
            for other in holders - {rank.number} if rank.number in holders else ():
                rank.channel.release(_message(rank.number, other, number))


def _total(rank: StageRank, mine: Pieces, holders: frozenset[int], number: int) -> Pieces:
    layout = [Sent(tuple(mine[0].shape), mine[0].dtype)]
    terms: dict[int, Pieces] = {rank.number: mine}
    for other in holders - {rank.number}:
        message = _message(other, rank.number, number)
        rank.channel.expect(message, other, layout)
        received: RankTensors = rank.channel.receive(message)
        terms[other] = received[0]
    ordered = [terms[number] for number in sorted(terms)]
    total = ordered[0]
    for pieces in ordered[1:]:
        total = _added(total, pieces)
    return total


def _given(rank: StageRank, own: Mapping[str, Pieces], name: str) -> Pieces:
    """A rank's own part; a stage whose micro-batches count nothing has none."""
    return own[name] if name in own else [torch.zeros_like(pieces[name]) for pieces in rank.state.pieces]


def _added(a: Pieces, b: Pieces) -> Pieces:
    return [x + y for x, y in zip(a, b, strict=True)]


def _message(source: int, target: int, number: int) -> Message:
    return Message(Payload.GRADIENT, source, target, -1 - number)
