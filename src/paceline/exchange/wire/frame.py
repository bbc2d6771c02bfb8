"""A frame: a few numbers and tensors that are sent at once. What they mean is the sender's and the receiver's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NO_NUMBERS: Final = np.empty(0, dtype=np.int64)


def no_numbers() -> NDArray[np.int64]:
    """Return what a frame has for numbers that has none; it is the same for all."""
    return _NO_NUMBERS


@dataclass(slots=True)
class Frame:
    """What is sent.

    Attributes:
        kind: what it is; see `exchange.messages.Kind`.
        epoch: of the sender's view.
        request: chosen by who asks, and repeated in the answer.
        worker, sequence, clock, weight: of an update or a read.
        numbers: further whole numbers. [n] int64
        text: a little JSON, where there is need.
        tensors: contiguous, on the CPU.
    """

    kind: int
    epoch: int = 0
    request: int = 0
    worker: int = 0
    sequence: int = 0
    clock: int = -1
    weight: float = 1.0
    numbers: NDArray[np.int64] = field(default_factory=no_numbers)
    text: str = ""
    tensors: Sequence[Tensor] = ()


class Meta(NamedTuple):
    """Type and shape of a tensor that is about to arrive."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Placing: TypeAlias = Callable[[Frame, Sequence[Meta]], Sequence[Tensor] | None]
"""Given a frame without its tensors and their types, returns where they are to be put, or None: in the connection's own
memory."""


class Connection(Protocol):
    """A way to one peer. Several threads may send, one at a time; one receives."""

    @property
    def sent_bytes(self) -> int:
        """Of all frames that were sent."""
        ...

    @property
    def received_bytes(self) -> int:
        """Of all frames that were received."""
        ...

    def send(self, frame: Frame) -> None:
        """Send a frame; its tensors are not read any more once this returns.

        Raises:
            ConnectionLost: the peer is gone.
        """
        ...

    def receive(self, place: Placing | None = None) -> Frame:
        """Wait for a frame. Its tensors are valid until the next `receive`, unless `place` gave the memory.

        Raises:
            ConnectionLost: the peer is gone, or `close` was called here.
            ExchangeError: what arrived is no frame.
        """
        ...

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` is woken. May be called twice and from any thread."""
        ...
