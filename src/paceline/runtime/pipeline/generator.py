"""The random generator travels with the activations: each stage draws on where the one before it stopped.

So the numbers of a micro-batch are those of the serial model, whatever the number of stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

START = "generator at the start"
"""Name of the state that a stage began with, kept where its forward pass is computed again."""


@contextlib.contextmanager
def drawing_from(start: int | Tensor, device: torch.device) -> Iterator[list[Tensor]]:
    """Draw as a generator would that is seeded so, or has this state; the list is given the state at the end.

    The global generators are left as they were.
    """
    after: list[Tensor] = []
    with torch.random.fork_rng():
        if isinstance(start, int):
            torch.manual_seed(start)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(start.cpu(), device)
        else:
            torch.set_rng_state(start)
        yield after
        after.append(torch.cuda.get_rng_state(device).to(device) if device.type == "cuda" else torch.get_rng_state())
