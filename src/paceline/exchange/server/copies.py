"""A shard as a message, on its way to a replica in the making."""

from __future__ import annotations

import json

from paceline.errors import ExchangeError
from paceline.exchange.job import Job
from paceline.exchange.messages import Kind
from paceline.exchange.shard.shard import Shard, ShardState
from paceline.exchange.wire.frame import Frame


def copy_of(shard: Shard, source: int, epoch: int) -> Frame:
    """Return all of a shard as a frame."""
    tensors, meta = shard.state()
    text = json.dumps({"shard": shard.number, "source": source, "names": list(tensors), "meta": meta})
    return Frame(Kind.COPY, epoch=epoch, text=text, tensors=[tensor.contiguous() for tensor in tensors.values()])


def copied(frame: Frame, job: Job) -> tuple[int, Shard]:
    """Read what `copy_of` made. Returns the source and the shard.

    Raises:
        ExchangeError: it is no such frame.
    """
    try:
        values = json.loads(frame.text)
        tensors = dict(zip(values["names"], frame.tensors, strict=True))
        return int(values["source"]), Shard.of(job, int(values["shard"]), ShardState(tensors, values["meta"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ExchangeError(f"a copy of a shard cannot be read: {error!r}") from error
