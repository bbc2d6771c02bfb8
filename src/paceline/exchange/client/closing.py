"""Synchronous steps are closed by their workers: shards are asked how far they are, and for the norm.

A worker asks after each of its pushes, before anybody hears that the task is done. Whoever asks after the last piece
has come to the last shard finds all of them whole and closes the step; if it dies before that, its task is not done,
and is somebody else's. So no step stays open, and nobody waits here for the pieces of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.errors import ExchangeError, NonFiniteError
from paceline.exchange.client.errands import Errand, Errands
from paceline.exchange.client.outgoing import Outgoing
from paceline.exchange.client.pushes import Push
from paceline.exchange.job import Job
from paceline.exchange.messages import Kind
from paceline.exchange.shard.norms import Share, Stage, closing, norm_of
from paceline.exchange.view import View
from paceline.exchange.wire.frame import Frame

_NOTHING: Final = Outgoing((), (), ())


class Norms(Errand):
    """The question what shards know of the norm of a step's gradient.

    Attributes:
        shares: of each shard that has answered.
    """

    def __init__(self, clock: int, shards: int) -> None:
        super().__init__(range(shards))
        self.shares: dict[int, Share] = {}
        self._clock = clock

    def holder(self, view: View, shard: int) -> int:
        """The tail: what it has, all replicas have."""
        return view.tail(shard)

    def frame(self, shards: Sequence[int]) -> Frame:
        """See `Errand`."""
        return Frame(Kind.NORMS, clock=self._clock, numbers=np.array(shards, dtype=np.int64))

    def take(self, shards: Sequence[int], answer: Frame) -> None:
        """See `Errand`."""
        stages = answer.numbers.tolist()
        values = answer.tensors[0].tolist() if answer.tensors else []
        if len(stages) != len(shards) or len(values) != len(shards):
            raise ExchangeError(f"a server told {len(stages)} stages and {len(values)} norms of {len(shards)} shards.")
        self.shares.update(
            (shard, Share(Stage(stage), value)) for shard, stage, value in zip(shards, stages, values, strict=True)
        )


def close(job: Job, errands: Errands, clock: int) -> float | None:
    """Close a step if all of its pieces have come.

    Returns:
        The norm of its gradient, before it is clipped; None: pieces are missing, and whoever pushes them closes it.

    Raises:
        NonFiniteError: it cannot be clipped.
        ExchangeError: see `Errands.finish`.
    """
    asked = Norms(clock, job.shards)
    errands.begin(asked)
    errands.finish(asked)
    norm = norm_of(asked.shares.values())
    if norm is None or all(share.stage is Stage.CLOSED for share in asked.shares.values()):
        return norm
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"the gradient of step {clock + 1} cannot be clipped: its norm is {norm}. It was not applied. Try a lower "
            "learning rate, and resume."
        )
    update = closing(clock, norm)
    push = Push(update.worker, update.sequence, (), norm, [update.read] * job.shards, _NOTHING)
    errands.begin(push)
    errands.finish(push)
    return norm
