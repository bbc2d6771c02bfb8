"""A shard as a message, on its way to a replica in the making."""

from __future__ import annotations

import json

from paceline.errors import ExchangeError
from paceline.exchange.job import Job
from paceline.exchange.messages import Kind
from paceline.exchange.shard.shard import Shard, ShardState
from paceline.exchange.view import Move
from paceline.exchange.wire.frame import Frame


def copy_of(shard: Shard, move: Move, epoch: int) -> Frame:
    """Return all of a shard as a frame, for a move."""
    tensors, meta = shard.state()
    text = json.dumps({"move": move, "names": list(tensors), "meta": meta})
    return Frame(Kind.COPY, epoch=epoch, text=text, tensors=[tensor.contiguous() for tensor in tensors.values()])


def copied(frame: Frame, job: Job) -> tuple[Move, Shard]:
    """Read what `copy_of` made. Returns the move and the shard.

    Raises:
        ExchangeError: it is no such frame.
    """
    try:
        values = json.loads(frame.text)
        tensors = dict(zip(values["names"], frame.tensors, strict=True))
        move = Move(*values["move"])
        return move, Shard.of(job, move.shard, ShardState(tensors, values["meta"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ExchangeError(f"a copy of a shard cannot be read: {error!r}") from error
