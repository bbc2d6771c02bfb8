"""Stopping a run in good order: Ctrl-C and SIGTERM end it after the step in progress, on all ranks at the same step.

Knows signals and the default process group; knows nothing of what a step is.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Remembers the first SIGINT, SIGTERM or SIGHUP while entered; a second one acts at once, as if this were not here.

    Signals reach ranks at different moments, so the ranks agree once a step: `begin_vote` starts a reduction of four
    bytes that travels while the step computes, `end_vote` reads it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._vote: tuple[torch.Tensor, Any] | None = None

    def __enter__(self) -> Self:
        # Handlers belong to the main thread; in any other, whoever owns that one decides when to stop.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask for a stop as the signal `number` would."""
        self._received = self._received or number

    def begin_vote(self) -> None:
        """Start telling the other ranks whether this one was asked to stop. Collective."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        ballot = torch.tensor([self._received], dtype=torch.int32, device=self._device)
        self._vote = (ballot, dist.all_reduce(ballot, op=dist.ReduceOp.MAX, async_op=True))

    def end_vote(self) -> int | None:
        """Return the signal that some rank had received by `begin_vote`, the same on all ranks, or None. Collective."""
        if self._vote is None:
            return self._received or None
        ballot, work = self._vote
        self._vote = None
        work.wait()
        return int(ballot.item()) or None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.request(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
