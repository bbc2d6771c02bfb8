"""Micro-batches: a batch is cut along its samples into pieces that are as equal as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from paceline.placement.fitting import check_batch
from paceline.plan import Plan
from paceline.program.capture import Batch

_GOLDEN = 0x9E3779B97F4A7C15  # odd, and far from any small number of calls
Rows = list[tuple[int, int]]
"""Ranges of samples, from the first to the one after the last."""


def samples_of(batch: Batch) -> int:
    """Return the size of the batch dimension: the first of the first tensor that has one."""
    return next((leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)


def count_for(batch: Batch, plan: Plan, parts: int) -> int:
    """Return in how many micro-batches a batch flows that is divided into parts.

    Raises:
        PlanError: the parts do not divide the batch.
    """
    if parts > 1:
        check_batch(samples_of(batch), plan.mesh.inner)
    wanted = plan.pipeline.micro_batches
    return max(1, min(samples_of(batch) // parts, 2 * plan.mesh.stage_ranks if wanted is None else wanted))


def micro_batches(batch: Batch, count: int, parts: int = 1) -> list[Any]:
    """Cut a batch into `count` micro-batches, the larger ones first; fewer where it has fewer samples.

    Tensors without the batch dimension go with each of them.

    Args:
        batch: with a number of samples that `parts` divides.
        count: how many micro-batches.
        parts: into which each micro-batch will be divided, as the whole batch is: micro-batch `i` has the i-th piece of
            each part.
    """
    size = samples_of(batch)
    found = []
    for rows in _rows(size // parts, count):
        ranges = [
            (start + part * size // parts, end + part * size // parts) for part in range(parts) for start, end in rows
        ]
        found.append(_taken(batch, size, ranges))
    return found


def part_of(batch: Batch, index: int, parts: int) -> Any:
    """Return the part of a batch that a process is given which takes one of several."""
    size = samples_of(batch)
    length = size // parts
    return _taken(batch, size, [(index * length, (index + 1) * length)])


def _rows(size: int, count: int) -> list[Rows]:
    whole, larger = divmod(size, min(count, size))
    found, start = [], 0
    for index in range(min(count, size)):
        end = start + whole + (index < larger)
        found.append([(start, end)])
        start = end
    return found


def _taken(batch: Batch, size: int, ranges: Sequence[tuple[int, int]]) -> Any:
    def take(leaf: Tensor) -> Tensor:
        if not leaf.ndim or leaf.shape[0] != size:
            return leaf
        pieces = [leaf[start:end] for start, end in ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return pytree.tree_map_only(Tensor, take, batch)


def micro_batch_seeds(first: int, count: int) -> list[int]:
    """Return seeds of the random operators of the micro-batches of a call; the first one's is that of the call."""
    return [first, *((first + index * _GOLDEN) % (1 << 63) for index in range(1, count))]
