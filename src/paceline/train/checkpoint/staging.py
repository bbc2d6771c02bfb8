"""Staging: a copy of the state as it is at one moment, which training may then overwrite.

The buffers are kept from save to save, so memory is flat and only the first save pays for allocating them. They are
pinned when the state is on a GPU; the copy is then queued behind the kernels already running, and training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.train.checkpoint.pieces import Held


@dataclass(frozen=True)
class Snapshot:
    """Pieces as they were when the snapshot was taken; call `ready` before reading them."""

    pieces: tuple[Held, ...]
    events: tuple[torch.cuda.Event, ...]

    def ready(self) -> None:
        """Wait until the copies from the GPU have arrived."""
        for event in self.events:
            event.synchronize()


class Staging:
    """Buffers on the CPU for the pieces that this process writes. One snapshot at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @torch.no_grad()
    def take(self, pieces: Sequence[Held]) -> Snapshot:
        """Copy the tensors of `pieces`, overwriting the snapshot before."""
        buffers: dict[tuple[int, str], Tensor] = {}
        staged = []
        devices: set[torch.device] = set()
        for held in pieces:
            place = (held.rank, held.key)
            buffer = self._buffers.get(place)
            if buffer is None or buffer.shape != held.tensor.shape or buffer.dtype != held.tensor.dtype:
                buffer = torch.empty(held.tensor.shape, dtype=held.tensor.dtype, pin_memory=held.tensor.is_cuda)
            buffer.copy_(held.tensor.detach(), non_blocking=held.tensor.is_cuda)
            if held.tensor.is_cuda:
                devices.add(held.tensor.device)
            buffers[place] = buffer
            staged.append(replace(held, tensor=buffer))
        self._buffers = buffers
        events = []
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return Snapshot(tuple(staged), tuple(events))

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers = {}
