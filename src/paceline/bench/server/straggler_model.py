"""What `straggler` trains: next to nothing, on samples that take their time, three times as long in one worker.

Time passes asleep, so that workers do not slow each other down on a machine of few cores.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn


class Line(nn.Module):
    """A straight line."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [B, 64], [B] -> []
        """Return the mean squared error."""
        return (x @ self.slope - y).square().mean()


def build() -> tuple[Line, dict[str, Tensor]]:
    """The factory of the model."""
    return Line(), {"x": torch.zeros(2, 64), "y": torch.zeros(2)}


class Naps(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that take a while.

    Args:
        length: samples.
        nap_s: seconds that one takes.
        slow: how many times as long they take in the process that comes first.
        folder: where processes find out which that is.
    """

    def __init__(self, length: int, nap_s: float, slow: float, folder: str) -> None:
        self._length, self._nap_s, self._slow, self._folder = length, nap_s, slow, Path(folder)
        self._held: IO[str] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """Return some samples."""
        time.sleep(len(indices) * self._nap_s * (self._slow if self._is_slow() else 1.0))
        return [{"x": torch.ones(64), "y": torch.ones(())} for _ in indices]

    def _is_slow(self) -> bool:
        """Whether this process was the first to ask; it holds a lock for as long as it lives."""
        if self._held is None:
            self._held = (self._folder / "slow").open("w")
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._slowest = True
            except BlockingIOError:
                self._slowest = False
        return self._slowest
