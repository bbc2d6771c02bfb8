"""How much of the processors others had while ranks were at work, from what the kernel counts."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_STATISTICS = Path("/proc/stat")
_IDLE = (3, 4)  # of the line's numbers: idle, and idle with input or output under way


@dataclass(frozen=True)
class Moment:
    """What was counted until then, in seconds: by the clock, by all processors, and by this process."""

    clock: float
    busy: float
    own: float


def now() -> Moment:
    """Return what is counted so far. Time that a hypervisor takes away counts as busy."""
    return Moment(time.perf_counter(), _busy(), time.process_time())


def others_since(began: Moment) -> float:
    """Return how many processors others had on average since then; a collective where there are ranks.

    Returns:
        0 where the system does not tell.
    """
    ended = now()
    own = torch.tensor([ended.own - began.own], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(own)
    others = torch.tensor(
        [(ended.busy - began.busy - float(own)) / max(ended.clock - began.clock, 1e-9)], dtype=torch.float64
    )
    if dist.is_initialized():
        dist.broadcast(others, src=0)
    return max(0.0, float(others))


def _busy() -> float:
    """Return seconds that processors of this system were at work since it started."""
    if not _STATISTICS.exists():
        return 0.0
    numbers = [int(word) for word in _STATISTICS.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return float(sum(numbers) - sum(numbers[place] for place in _IDLE)) / os.sysconf("SC_CLK_TCK")
