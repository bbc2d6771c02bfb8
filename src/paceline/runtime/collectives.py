"""The primitive communications of a placed graph.

In a graph they stand for what an executor does: over process groups, or between the ranks of one process. Calling them
computes shapes only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.placement.located import coordinate
from paceline.placement.placements import Placement, local_shape
from paceline.placement.windows import window, window_sum


def all_reduce(x: Tensor, axis: str, parts: int) -> Tensor:
    """Start the sum of `x` over the ranks of an axis."""
    return x.new_empty(x.shape)


def all_reduce_in_place(x: Tensor, axis: str, parts: int) -> Tensor:
    """Start the sum of `x`, a buffer that nothing else reads, into itself."""
    return x.new_empty(x.shape)


def all_reduce_max(x: Tensor, axis: str, parts: int) -> Tensor:
    """Start the maximum of `x` over the ranks of an axis."""
    return x.new_empty(x.shape)


def reduce_scatter(x: Tensor, axis: str, parts: int) -> Tensor:
    """Start the sum of x: [parts, n] of which rank r receives row r: [n]."""
    return x.new_empty(x.shape[1:])


def all_gather(x: Tensor, axis: str, parts: int) -> Tensor:
    """Start the gathering of x: [n] from every rank: [parts, n]."""
    return x.new_empty((parts, *x.shape))


def all_to_all(x: Tensor, axis: str, parts: int) -> Tensor:
    """Start the exchange of x: [parts, n]: row i goes to rank i; row j of the result came from rank j."""
    return x.new_empty(x.shape)


def wait(x: Tensor) -> Tensor:
    """Wait for a started communication and return its result."""
    return x.new_empty(x.shape)


def take_piece(x: Tensor, placement: Placement, axis: str, parts: int) -> Tensor:
    """Cut this rank's piece out of a replicated tensor."""
    return x.new_empty(local_shape(tuple(x.shape), placement, parts))


def take_term(x: Tensor, axis: str, parts: int) -> Tensor:
    """Make a partial sum of a replicated tensor: itself on the first rank of the axis, zero on the others."""
    return x.new_empty(x.shape)


FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        all_reduce,
        all_reduce_in_place,
        all_reduce_max,
        reduce_scatter,
        all_gather,
        all_to_all,
        wait,
        take_piece,
        take_term,
        coordinate,
        window,
        window_sum,
    )
}
"""By the name under which they are stored on disk."""

STARTS = {all_reduce, all_reduce_in_place, all_reduce_max, reduce_scatter, all_gather, all_to_all, window, window_sum}
"""Those that communicate; each is followed by a `wait`."""
