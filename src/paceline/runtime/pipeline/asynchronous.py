"""Asynchronous training: batches flow without draining, and each stage updates itself while others compute.

What it computes is defined: the schedule says which version of its weights each stage reads for each micro-batch, and
which gradients make the next version. `verify.replay` does the same serially.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.runtime.interface import Accumulated
from paceline.runtime.pipeline.ranks import StageRanks
from paceline.runtime.pipeline.reduce import averaged
from paceline.runtime.pipeline.shares import Shares
from paceline.runtime.pipeline.stage_rank import StageRank
from paceline.runtime.pipeline.sums import Sums
from paceline.runtime.pipeline.versions import Versions
from paceline.runtime.pipeline.walk import MicroBatch, Walk
from paceline.schedule import Schedule

Update = Callable[[int, int], None]
"""Is called when the gradients of a stage are in place (stage, version that it makes), to change its parameters."""


class Made(NamedTuple):
    """A log entry: what a rank put into a version of the weights of a stage.

    Attributes:
        rank: of the pipeline.
        stage: whose weights they are.
        version: that was made; versions count from 0, the weights at the beginning.
        read: the micro-batches whose gradients were added up, in that order, each with the version it had read.
    """

    rank: int
    stage: int
    version: int
    read: tuple[tuple[int, int], ...]


Log = list[Made]


@dataclass(frozen=True)
class AsynchronousResult:
    """What several batches gave: the loss of each with its weight, and what the ranks of this process did."""

    batches: list[Accumulated]
    log: Log


def check_asynchronous(ranks: StageRanks) -> None:
    """Refuse what has no defined meaning without a flush.

    Raises:
        PlanError: a parameter lies on several stages.
    """
    tied = list(ranks.tied_parameters)
    if tied:
        raise PlanError(
            f"the parameter '{tied[0]}' is used by several stages, which an asynchronous schedule updates at different "
            "times: its copies would part. Take a synchronous schedule (1f1b), untie the parameter, or choose "
            "boundaries that keep its users on one stage."
        )


class Asynchronous:
    """One pass of a pipeline rank over several batches, updating as it goes.

    Args:
        rank: the pipeline rank.
        schedule: asynchronous, with its messages.
        micro_batches: of all batches, one after the other.
        shares: of each micro-batch within its update.
        update: changes the parameters of a stage by their gradients.
    """

    def __init__(
        self,
        rank: StageRank,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        shares: Shares,
        update: Update,
        recompute: frozenset[int],
    ) -> None:
        self._rank = rank
        self._update = update
        self._step = micro_batches[0].step
        parameters = {stage: list(self._step.parameters_of(stage)) for stage in rank.stages}
        self._versions = Versions(rank, schedule, parameters)
        self.log: Log = []
        self.walk = Walk(
            rank,
            schedule,
            micro_batches,
            shares,
            recompute,
            parameter=self._versions.parameter,
            update=self._apply,
        )

    def _apply(self, stage: int, version: int, sums: Sums) -> None:
        gradients = averaged(self._rank, self._step, stage, sums)
        self._versions.make_room(stage, version, self.walk.position)
        held: list[nn.Parameter] = []
        for name, pieces in gradients.items():
            for parameters, gradient in zip(self._rank.state.pieces, pieces, strict=True):
                parameter = parameters[name]
                assert isinstance(parameter, nn.Parameter)
                parameter.grad = gradient
                held.append(parameter)
        with torch.enable_grad():
            self._update(stage, version)
        for parameter in held:
            parameter.grad = None
        self.log.append(Made(self._rank.number, stage, version, tuple(sums.read)))
