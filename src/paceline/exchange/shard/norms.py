"""How far each shard is with a step, and what it has of the global norm by which it is clipped; what follows from all.

Where a job closes steps (`Job.closes_steps`), one that has all its pieces waits in its shard until it is *closed*: no
shard is ahead of others that lack a piece, whoever dies. A closing is an update like any other, in the log and on its
way through the chain; it has no parts and no tasks, and its weight is the norm (0 where nothing is clipped). It follows
from the shares of all shards alone, so whoever adds them up has the same closing, to the bit, and which of them comes
first is all one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from paceline.exchange.job import Job
from paceline.exchange.updates import Part, Update

_CLOSER: Final = 0
"""Workers are numbered from 1: a closing is of nobody in particular."""

_BLOCK: Final = 1 << 16
_TORCH_EPSILON: Final = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm that it divides by."""


class Stage(IntEnum):
    """How far a shard is with a step."""

    GATHERING = 0
    """Pieces are missing, or the step before is not closed."""
    WHOLE = 1
    """All pieces are there, and it waits to be closed."""
    CLOSED = 2
    """It was applied."""


class Share(NamedTuple):
    """What a shard knows of a step.

    Attributes:
        stage: how far it is.
        value: WHOLE: the sum of the squares of the mean gradient's elements here, where it is clipped; else 0. CLOSED:
            the norm; NaN where a later step was closed since.
    """

    stage: Stage
    value: float = math.nan


def squares(parts: Iterable[Part]) -> float:
    """Return the sum of squares of some gradients.

    Additions are of float64, in an order that their number alone determines: the same bits on every machine.
    """
    return _sum(_squares(part.values) for part in parts)


def _squares(values: Tensor) -> float:
    flat = values.detach().reshape(-1)
    size = min(_BLOCK, 1 << max(0, len(flat) - 1).bit_length())
    total = torch.zeros(size, dtype=torch.float64)
    for block in torch.split(flat, size):
        exact = block.double()
        total[: len(block)] += exact * exact  # multiplied and added apart, as in `pieces`
    while size > 1:
        size //= 2
        total = total[:size] + total[size:]
    return float(total)


def norm_of(shares: Iterable[Share]) -> float | None:
    """Return the norm of a step from the shares of all shards; None: it does not follow from them, or is past."""
    known = list(shares)
    closed = [share.value for share in known if share.stage is Stage.CLOSED]
    if closed:
        return None if math.isnan(closed[0]) else closed[0]
    if any(share.stage is not Stage.WHOLE for share in known):
        return None
    total = _sum(share.value for share in known)
    return math.sqrt(total)


def _sum(values: Iterable[float]) -> float:
    """Add up what is not negative; exact, and so in whatever order."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def closing(clock: int, norm: float) -> Update:
    """Return what closes a step."""
    return Update(_CLOSER, clock + 1, (), -1, norm, ())


def closed_by(job: Job, worker: int, sequence: int) -> int | None:
    """Return the clock that an update closes; None: it is another update."""
    return sequence - 1 if job.closes_steps and worker == _CLOSER else None


def factor(clip: float, norm: float) -> float:
    """Return what a gradient of this norm is multiplied by, so that it is at most `clip`."""
    return min(1.0, clip / (norm + _TORCH_EPSILON))
